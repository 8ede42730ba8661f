"use strict";
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
      rows.sort(([a], [b]) => compare(a, b, descending ? -1 : 1));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function key(cell) {
  return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent.trim();
}

// Cells without a number stay below, whichever way a column is sorted.
function compare(a, b, sign) {
  const missing = Number(Number.isNaN(a)) - Number(Number.isNaN(b));
  if (missing || Number.isNaN(a)) return missing;
  if (typeof a === "number" && typeof b === "number") return sign * (a < b ? -1 : a > b ? 1 : 0);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}
