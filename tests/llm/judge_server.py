"""A server with the part of OpenAI's interface that a judge needs, in several bad moods."""

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Answer with the fixed verdict that ``mood`` names.

    Moods: ``longer`` (the longer answer is better), ``first`` (always A), ``garbage`` (a page of HTML), ``talk`` (a sentence),
    ``busy`` (429, then 500, then as ``longer``), ``down`` (always 503), ``slow`` (``longer`` after 0.2 s).
    """

    daemon_threads = True

    def __init__(self, mood="longer"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mood = mood
        self.asked, self.answered, self.keys = Counter(), Counter(), set()
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, mood = request["messages"][0]["content"], self.server.mood
        with self.server.lock:
            self.server.asked[text] += 1
            self.server.keys.add(self.headers["Authorization"])
            number = self.server.asked[text]
        if mood == "down" or (mood == "busy" and number < 3):
            return self._send(503 if mood == "down" else 429 if number == 1 else 500, b'{"error": {"message": "later"}}')
        if mood == "slow":
            time.sleep(0.2)
        if mood == "garbage":
            return self._send(200, b"<html>no</html>", "text/html")
        first, second = (text.split(f"[ANSWER {name}]\n")[1].split(f"\n[END OF ANSWER {name}]")[0] for name in "AB")
        word = "A" if mood == "first" or len(first) > len(second) else "B" if len(first) < len(second) else "TIE"
        content = {"talk": "Both have their merits.", "first": "a."}.get(mood, f"They differ.\n**{word}**")
        with self.server.lock:
            self.server.answered[text] += 1
        choice = {"message": {"role": "assistant", "content": content}}
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        self._send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _send(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        try:
            self.wfile.write(body)
        except BrokenPipeError:  # the client was killed
            sys.stderr.write("")

    def log_message(self, *_):
        """Say nothing."""
