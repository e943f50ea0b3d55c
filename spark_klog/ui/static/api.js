// Requests to the server, and its server-sent events.

let session = { allowsChanges: false, token: "" };

export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(key, String(value));
  }
  return `/api/${path}?${query}`;
}

async function answer(response) {
  if (response.status === 401) location.reload(); // the server was started again: its page says how to log in
  const found = await response.json();
  if (!response.ok) throw new Error(found.error ?? response.statusText);
  return found;
}

export async function get(path, parameters) {
  return answer(await fetch(address(path, parameters)));
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Klog-Token": session.token };
  return answer(await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

export async function openSession() {
  session = await get("session");
  return session;
}

export const allowsChanges = () => session.allowsChanges;
// Where the cluster is: {servers, cluster, commandConfig}.
export const access = () => session;

// Calls listeners by the event's name until the returned function is called.
export function listen(path, parameters, listeners) {
  const source = new EventSource(address(path, parameters));
  for (const [name, listener] of Object.entries(listeners)) {
    source.addEventListener(name, (event) => listener(event.data === undefined ? undefined : JSON.parse(event.data)));
  }
  return () => source.close();
}
