// The router: a view is a fragment #/NAME/ARGUMENT...?KEY=VALUE&...; leaving a view ends its live updates.

import { openSession } from "./api.js";
import { el, link, say } from "./dom.js";
import { watchOutages } from "./outage.js";
import { groupView, groupsView } from "./groups.js";
import { loadsView, queriesView } from "./jobs.js";
import { messagesView, recordView } from "./messages.js";
import { overviewView } from "./overview.js";
import { schemaView, schemasView } from "./schemas.js";
import { topicView } from "./topic.js";

const VIEWS = {
  overview: overviewView, topic: topicView, messages: messagesView, record: recordView,
  groups: groupsView, group: groupView, queries: queriesView, loads: loadsView,
  schemas: schemasView, schema: schemaView,
};
const LINKS = [["Overview", "overview"], ["Groups", "groups"], ["Queries", "queries"], ["Loads", "loads"], ["Schemas", "schemas"]];
const PART_OF = { topic: "overview", messages: "overview", record: "overview", group: "groups", schema: "schemas" };
const KEYS = { o: "overview", g: "groups", q: "queries", l: "loads", s: "schemas" };
const main = document.getElementById("main");
let leave = null;

function place() {
  try {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    const parts = path.split("/").map(decodeURIComponent);
    if (Object.hasOwn(VIEWS, parts[0])) return [new URLSearchParams(query), ...parts];
  } catch { /* no address of a view */ }
  return [new URLSearchParams(), "overview"];
}

async function show() {
  if (location.hash === "#main") return;
  leave?.abort();
  const left = (leave = new AbortController());
  const [query, name, ...rest] = place();
  const current = PART_OF[name] ?? name;
  document.getElementById("views").replaceChildren(...LINKS.map(([text, view]) => {
    const made = link(text, view);
    if (view === current) made.setAttribute("aria-current", "page");
    return made;
  }));
  document.title = ["klog", name, ...rest].join(" · ");
  say("");
  main.replaceChildren(el("p", { class: "soft" }, "Loading…"));
  try {
    // `until(stop)` registers what ends the view's updates.
    const until = (stop) => (left.signal.aborted ? stop() : left.signal.addEventListener("abort", stop));
    const shown = await VIEWS[name](until, query, ...rest);
    if (left.signal.aborted) return;
    main.replaceChildren(...shown);
    main.dataset.view = name;
  } catch (error) {
    if (left.signal.aborted) return;
    main.replaceChildren(el("h1", {}, "This view can't be shown"), el("p", { class: "bad", role: "alert" }, error.message));
    main.dataset.view = "error";
  }
}

function moveRow(step) {
  const rows = [...main.querySelectorAll("tbody a, tbody summary, tbody button")].filter((one) => one.offsetParent);
  const at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at + step))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof Element && event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    main.querySelector("input[type=search]")?.focus();
    event.preventDefault();
  } else if (event.key === "j" || event.key === "k") {
    moveRow(event.key === "j" ? 1 : -1);
  } else if (Object.hasOwn(KEYS, event.key)) {
    location.hash = `#/${KEYS[event.key]}`;
  } else if (event.key === "?") {
    say("Keys: / search, j and k next and previous row, o overview, g groups, q queries, l loads, s schemas");
  }
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

openSession().then((session) => {
  document.getElementById("servers").textContent = `${session.servers}${session.allowsChanges ? " · changes allowed" : ""}`;
  addEventListener("hashchange", show);
  watchOutages(() => { if (main.dataset.view === "error") show(); });
  show();
}, (error) => say(error.message));
