"use strict";
// Sort a table by a column; values that are missing stay at the end.
const heard = document.getElementById("heard");
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const at = [...head.parentNode.children].indexOf(head);
    const key = (row) => row.children[at].dataset.v ?? row.children[at].textContent.trim();
    const rows = [...body.rows];
    const numeric = rows.every((row) => key(row) === "" || !Number.isNaN(Number(key(row))));
    const now = head.getAttribute("aria-sort");
    const down = now === "none" ? numeric : now === "ascending"; // numbers: largest first
    const order = down ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return order * (numeric ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true }));
    });
    body.append(...rows);
    for (const other of head.parentNode.children) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    heard.textContent = `Sorted by ${button.textContent.trim()}, ${down ? "largest" : "smallest"} first.`;
  });
}
// Light or dark: the system's choice until the reader makes one.
const root = document.documentElement, theme = document.getElementById("theme");
const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const show = () => { theme.textContent = dark() ? "Light colours" : "Dark colours"; };
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
// A link to a federation opens it: at the click, since no event follows a second click on the same link, and at a change of the address.
const open = (hash) => { const goal = hash.length > 1 && document.getElementById(hash.slice(1)); if (goal && goal.tagName === "DETAILS") goal.open = true; };
for (const link of document.querySelectorAll("a[href^='#']")) link.addEventListener("click", () => open(link.hash));
addEventListener("hashchange", () => open(location.hash));
open(location.hash);
// Paper cannot be opened: print everything, then close again what was closed.
let closed = [];
addEventListener("beforeprint", () => { closed = [...document.querySelectorAll("details:not([open])")]; for (const each of closed) each.open = true; });
addEventListener("afterprint", () => { for (const each of closed) each.open = false; });
