"use strict";
(() => {
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  // Controls do nothing without this script, so they are hidden until it runs.
  for (const part of all("[data-script]")) part.hidden = false;

  const themes = ["system", "light", "dark"];
  one("#theme").addEventListener("click", (event) => {
    const root = document.documentElement;
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    event.currentTarget.textContent = "Theme: " + next;
  });

  const body = one("#case-table tbody");
  if (!body) return;
  const rows = [...body.rows];
  const caseOf = (row) => document.getElementById("case-" + row.dataset.case);

  const words = one("#words");
  const verdict = one("#verdict");
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const said = (row.textContent + " " + (row.dataset.also || "")).toLowerCase();
      const fits = wanted.every((word) => said.includes(word));
      const judged = verdict.value === "" || verdict.value === row.dataset.verdict ||
        (verdict.value === "failing" && row.dataset.failed === "1");
      row.hidden = !(fits && judged);
      caseOf(row).hidden = row.hidden;
      shown += row.hidden ? 0 : 1;
    }
    one("#shown").textContent = shown + " of " + rows.length + " cases shown";
  };
  words.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  one("#filters").addEventListener("submit", (event) => event.preventDefault());
  filter();

  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
  };
  const headings = all("#case-table thead th");
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = rows.map((row) => [key(row, column), row]);
      sorted.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
      body.append(...sorted.map(([, row]) => row));
    });
  });

  const show = () => {
    const found = /^#case-\d+$/.test(location.hash) && one(location.hash);
    if (!found) return;
    found.hidden = false;
    found.open = true;
    found.firstElementChild.focus();
  };
  addEventListener("hashchange", show);
  // A second click on the same link changes no hash.
  body.addEventListener("click", (event) => {
    if (event.target.closest("a") && event.target.closest("a").hash === location.hash) show();
  });
  show();

  one("#open").addEventListener("click", () => {
    for (const row of rows) caseOf(row).open = !row.hidden;
  });
  one("#close").addEventListener("click", () => {
    for (const row of rows) caseOf(row).open = false;
  });

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details.case[data-failed]").filter((part) => !part.open && !part.hidden);
    for (const part of closed) part.open = true;
  });
  addEventListener("afterprint", () => {
    for (const part of closed) part.open = false;
  });
})();
