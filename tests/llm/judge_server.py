"""A server with the part of OpenAI's interface that a judge needs, in several bad moods."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Answer with the fixed verdict that ``mood`` names, until the end of a ``with`` block.

    Moods: ``longer`` (the longer answer is better), ``first`` (always A), ``garbage`` (a page of HTML), ``talk`` (a sentence),
    ``busy`` (429, then 500, then as ``longer``), ``down`` (503 after six answers).
    """

    daemon_threads = True

    def __init__(self, mood="longer"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mood = mood
        self.asked, self.keys, self.answers = Counter(), set(), 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def server_close(self):
        self.shutdown()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, server = request["messages"][0]["content"], self.server
        with server.lock:
            server.asked[text] += 1
            server.keys.add(self.headers["Authorization"])
            errors = {"down": [503] * (server.answers >= 6), "busy": [429, 500][server.asked[text] - 1 :]}.get(server.mood)
            server.answers += not errors
        if errors:
            return self._send(errors[0], b'{"error": {"message": "later"}}')
        if server.mood == "garbage":
            return self._send(200, b"<html>no</html>", "text/html")
        first, second = (text.split(f"[ANSWER {name}]\n")[1].split(f"\n[END OF ANSWER {name}]")[0] for name in "AB")
        word = "A" if len(first) > len(second) else "B" if len(first) < len(second) else "TIE"
        content = {"talk": "Both have their merits.", "first": "a."}.get(server.mood, f"They differ.\n**{word}**")
        choice = {"message": {"role": "assistant", "content": content}}
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        self._send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _send(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""
