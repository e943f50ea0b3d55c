"use strict";

// The switch of versions, from what versions.js lists: {versions, newest first, latest, stable}.
function makeSwitch(known) {
  const place = document.getElementById("versions");
  const here = place.textContent;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const page = location.href.slice(root.href.length);
  const open = async (version) => {
    const other = new URL(`../${version}/`, root);
    const samePage = new URL(page, other);
    // A version that lacks the page opens at its first one. So does each from file://, where the browser lets nobody look.
    const isThere = await fetch(samePage, { method: "HEAD" }).then((answer) => answer.ok, () => false);
    location.href = isThere ? samePage : new URL("index.html", other);
  };
  const select = document.createElement("select");
  select.setAttribute("aria-label", "Version");
  for (const version of known.versions) {
    const label = version === known.stable ? " (stable)" : version === known.latest ? " (latest)" : "";
    select.add(new Option(version + label, version, version === here, version === here));
  }
  select.addEventListener("change", () => open(select.value));
  place.replaceWith(select);

  const isOld = known.versions.indexOf(here) > known.versions.indexOf(known.stable);
  if (known.stable && here !== known.stable) {
    const note = document.createElement("p");
    note.className = "other-version";
    const link = document.createElement("a");
    link.href = new URL(`../${known.stable}/index.html`, root);
    link.addEventListener("click", (event) => {
      event.preventDefault();
      open(known.stable);
    });
    link.textContent = `The newest release is ${known.stable}.`;
    note.append(isOld ? `This page is about version ${here}. ` : `Version ${here} is not released. `, link);
    document.querySelector("article").prepend(note);
  }
}

// Browsers have a clipboard for pages from https://, file:// and localhost.
function addCopyButton(block) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  const text = block.querySelector("pre").textContent;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  block.append(button);
}

// Cells say what column they are of, for tables that are stacked: each row is a block, its first cell the title.
function labelCells(table) {
  const labels = [...(table.tHead?.rows[0].cells ?? [])].map((cell) => cell.textContent.trim());
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, column) => {
      if (column && labels[column]) cell.dataset.label = labels[column];
      cell.classList.toggle("empty", !cell.textContent.trim());
    });
  }
}

// On a phone all tables are stacked, elsewhere those that are wider than the page's column.
function stackTables() {
  const isPhone = matchMedia("(max-width: 46em)").matches;
  for (const table of tables) table.classList.remove("stacked");
  const wide = [...tables].filter((table) => isPhone || table.offsetWidth > table.parentElement.clientWidth);
  for (const table of wide) table.classList.add("stacked");
}

if (window.KLOG_VERSIONS) makeSwitch(window.KLOG_VERSIONS);
// Fences without a language are usage lines, which nobody runs.
const snippets = document.querySelectorAll("[class*='highlight-']:not(.highlight-none) > .highlight");
if (navigator.clipboard) snippets.forEach(addCopyButton);
// Whoever has no pointer scrolls code that is wider than the page by its keys.
for (const block of document.querySelectorAll("article pre")) {
  if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
}
const tables = document.querySelectorAll("article table.docutils");
tables.forEach(labelCells);
stackTables();
document.getElementById(location.hash.slice(1))?.scrollIntoView({ behavior: "instant" }); // rows have moved
// A phone's window changes its height, with the address bar, while one scrolls.
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) stackTables();
  width = innerWidth;
});
