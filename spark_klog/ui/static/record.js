// A record: JSON as a tree, other text as it is, bytes as hex; and how to read it again.

import { access } from "./api.js";
import { el, number, say } from "./dom.js";

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const PREVIEW = 400;
// Nodes of a tree that are made at once; the rest is made when its branch is opened.
const MOST_CHILDREN = 1000;

// Control characters, and those that turn the direction of text, as their code.
export const visible = (text) => text.replace(CONTROLS, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

const decoded = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

export function hex(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const part = [...data.slice(at, at + 16)];
    const codes = part.map((one) => one.toString(16).padStart(2, "0")).join(" ").padEnd(48);
    const text = part.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes} ${text}`);
  }
  return lines.join("\n");
}

function preview(shown) {
  if (shown === null) return el("span", { class: "soft" }, "null");
  const size = `${number(shown.size)} bytes`;
  if (shown.text === undefined) {
    const line = hex(decoded(shown.base64).slice(0, 16)).slice(8);
    return el("span", { class: "mono preview", title: size }, line, shown.size > 16 ? " …" : "");
  }
  const isCut = shown.text.length > PREVIEW || new TextEncoder().encode(shown.text).length < shown.size;
  return el("span", { class: "preview", title: size }, visible(shown.text.slice(0, PREVIEW)), isCut ? "…" : "");
}

// JSON with all digits of its numbers, which JSON.parse would round: texts and names begin with "s", numbers are texts
// that begin with "n".
const TOKENS = /"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g;
const parseExact = (text) => JSON.parse(text) && JSON.parse(text.replace(TOKENS, (one) => (one[0] === '"' ? `"s${one.slice(1)}` : `"n${one}"`)));
const leaf = (value) => (typeof value !== "string" ? JSON.stringify(value) : value[0] === "n" ? value.slice(1) : JSON.stringify(value.slice(1)));

function tree(name, value) {
  if (value === null || typeof value !== "object") {
    return el("div", { class: "leaf" }, name === null ? "" : `${visible(name)}: `, el("code", {}, visible(leaf(value))));
  }
  const entries = Object.entries(value);
  const title = `${name === null ? "" : `${visible(name)}: `}${Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`}`;
  const branch = el("details", {}, el("summary", {}, title));
  branch.addEventListener("toggle", () => {
    if (!branch.open || branch.childElementCount > 1) return;
    branch.append(...entries.slice(0, MOST_CHILDREN).map(([key, one]) => tree(Array.isArray(value) ? key : key.slice(1), one)));
    if (entries.length > MOST_CHILDREN) branch.append(el("div", { class: "leaf soft" }, `and ${number(entries.length - MOST_CHILDREN)} more`));
  });
  return branch;
}

// `bytes` is the size of the record, also for JSON that was made of it.
function whole(title, shown, bytes = shown?.size) {
  if (shown === null) return [el("h2", {}, title), el("p", { class: "soft" }, "null")];
  const data = shown.text === undefined ? decoded(shown.base64) : null;
  const cut = (data ? data.length : new TextEncoder().encode(shown.text).length) < shown.size;
  const size = el("span", { class: "soft" }, ` ${number(bytes)} bytes${cut ? ", cut" : ""}`);
  if (data) return [el("h2", {}, title, size), el("pre", { tabindex: "0", "aria-label": `${title} in hex` }, hex(data))];
  let json;
  try {
    json = parseExact(shown.text);
  } catch { /* no JSON */ }
  if (json !== null && typeof json === "object") {
    const made = tree(null, json);
    made.open = true;
    return [el("h2", {}, title, size), el("div", { class: "tree" }, made)];
  }
  return [el("h2", {}, title, size), el("pre", { tabindex: "0", "aria-label": title }, visible(shown.text))];
}

function schemaLine(schema) {
  const which = schema.guid === null ? `schema id ${schema.id}` : `schema GUID ${schema.guid}`;
  const others = schema.uses > 1 ? ` and of ${number(schema.uses - 1)} other subjects` : "";
  const use = schema.subject === null ? "" : `, version ${schema.version} of ${visible(schema.subject)}${others}`;
  return `${schema.format === null ? "" : `${schema.format}, `}${which}${use}`;
}

// A key or value: by the schema that it names, if there is one, and then its bytes.
function column(title, shown, schema) {
  if (schema === null) return whole(title, shown);
  const line = schemaLine(schema);
  if (schema.json === null) return [...whole(title, shown), el("p", { class: "soft schema" }, `${line}: ${visible(schema.error)}`)];
  return [...whole(title, schema.json, shown.size), el("p", { class: "soft schema" }, line),
    el("details", {}, el("summary", {}, `${title} as bytes`), ...whole(`${title} as bytes`, shown))];
}

// What a table shows of a key or value.
export const rowPreview = (row, name) => preview(row[`${name}Schema`]?.json ?? row[name]);

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The columns of a row that are decoded by a schema, and its format.
const decodedColumns = (row) => ["key", "value"].map((name) => [name, row[`${name}Schema`]]).filter(([, one]) => (one?.json ?? null) !== null);

function consumeLine(row, { servers, cluster, commandConfig, registry }) {
  const named = cluster !== null ? ` --cluster ${quoted(cluster)}` : commandConfig !== null ? ` --command-config ${quoted(commandConfig)}` : "";
  const forms = decodedColumns(row).map(([name, one]) => ` -s ${name}=${one.format}`);
  const serdes = forms.length ? `${forms.join("")} -r ${quoted(registry)}` : "";
  return `klog consume -b ${quoted(servers)}${named} ${quoted(row.topic)} -p ${row.partition} --from ${row.offset} -n 1 --json${serdes}`;
}

function sparkSnippet(row, { servers, cluster, commandConfig, registry }) {
  const places = (end) => JSON.stringify({ [row.topic]: { [row.partition]: end } });
  const option = cluster !== null ? ["cluster", cluster] : ["kafka.bootstrap.servers", servers];
  return [
    ...(commandConfig === null ? [] : [`# add the settings of ${JSON.stringify(commandConfig)} as options, each with the prefix "kafka.", but those of "schema.registry." as they are`]),
    'df = (spark.read.format("klog")',
    `    .option(${option.map((one) => JSON.stringify(one)).join(", ")})`,
    `    .option("assign", ${JSON.stringify(JSON.stringify({ [row.topic]: [row.partition] }))})`,
    `    .option("startingOffsets", ${JSON.stringify(places(row.offset))})`,
    `    .option("endingOffsets", ${JSON.stringify(places(row.offset + 1))})`,
    ...decodedColumns(row).flatMap(([name, one]) => [`    .option("${name}Format", ${JSON.stringify(one.format)})`,
      // without it the subject is TOPIC-key or TOPIC-value, which need not exist: producers have other strategies
      ...(one.subject === null || one.subject === `${row.topic}-${name}` ? [] : [`    .option("${name}Subject", ${JSON.stringify(one.subject)})`])]),
    ...(decodedColumns(row).length ? [`    .option("schemaRegistryUrl", ${JSON.stringify(registry)})`] : []),
    "    .load())",
  ].join("\n");
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("copied");
  } catch {
    say("the browser does not allow copying: select the text");
  }
}

function copied(title, text) {
  return el("div", {}, el("button", { type: "button", on: { click: () => copy(text) } }, `Copy ${title}`),
    el("pre", { tabindex: "0", "aria-label": title }, text));
}

// A row's details, made when they are opened.
export function detail(row) {
  const made = el("details", {}, el("summary", {}, rowPreview(row, "value")));
  made.addEventListener("toggle", () => {
    if (!made.open || made.childElementCount > 1) return;
    made.append(...content(row));
  });
  return made;
}

// Of a dead letter: where its record is from, and what was wrong; the last header of a name counts.
function letterLine(row) {
  const said = (name) => row.headers.findLast((one) => one.key === `__${name.startsWith("klog") ? name : `connect.errors.${name}`}`)?.value?.text;
  if (said("topic") === undefined || said("offset") === undefined) return [];
  const attempts = said("klog.errors.attempts");
  const why = [said("exception.class.name"), said("exception.message")].filter((one) => one !== undefined).join(": ");
  return [el("p", { class: "letter" }, el("strong", {}, "Dead letter"), ` of ${visible(said("topic"))}-${visible(said("partition") ?? "?")} at offset ` +
    `${visible(said("offset"))}, by ${visible(said("connector.name") ?? "?")}${attempts === undefined ? "" : `, attempts ${visible(attempts)}`}: ${visible(why)}`)];
}

// Value, key, headers, and how to read them again.
export function content(row) {
  const headers = row.headers.flatMap((one) => whole(`Header ${visible(one.key)}`, one.value));
  const left = row.headerCount - row.headers.length;
  return [...letterLine(row), ...column("Value", row.value, row.valueSchema), ...column("Key", row.key, row.keySchema), ...headers,
    ...(left > 0 ? [el("p", { class: "soft" }, `and ${number(left)} more headers`)] : []),
    copied("klog consume", consumeLine(row, access())), copied("Spark", sparkSnippet(row, access()))];
}
