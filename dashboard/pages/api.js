// Requests to the server, and its event stream. An exported page has the answers in the file.

/** The run or the sample no longer exists. */
export class Gone extends Error {}

const exported = document.getElementById("exported");
const answers = exported && JSON.parse(exported.textContent);
export const isExported = Boolean(answers);

/** The address of a request, with its nonempty parameters sorted by name. */
export function address(name, values = {}) {
  const filled = Object.entries(values).filter(([, value]) => value != null && value !== "").sort();
  return filled.length ? `/api/${name}?${new URLSearchParams(filled)}` : `/api/${name}`;
}

async function answer(response) {
  const type = response.headers.get("content-type") ?? "";
  const body = type.includes("json") ? await response.json() : { message: await response.text() };
  if (response.ok) return body;
  const said = body.message ?? body.detail;
  const message = typeof said === "string" ? said : `the server answered ${response.status}`;
  throw body.error === "gone" ? new Gone(message) : new Error(message);
}

/** The server's answer to `name`, such as "curves", with these parameters. Throws `Gone`, or an error with a readable message. */
export async function get(name, values, signal) {
  const path = address(name, values);
  if (answers) {
    if (path in answers) return answers[path];
    const whole = address(name, { ...values, start: null, end: null, first: null, last: null }); // the page itself selects the range
    if (whole in answers) return answers[whole];
    throw new Gone("This part was not exported. `weft dashboard` shows the whole run.");
  }
  let response;
  try {
    response = await fetch(path, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: the dashboard may have ended, or the connection to it is lost.");
  }
  return answer(response);
}

/** Sends a request that changes something, with a header that forms on other sites cannot send. */
export async function post(name, body) {
  if (answers) throw new Error("An exported page has no server to ask.");
  const headers = { "content-type": "application/json", "x-weft-stop": "yes" };
  return answer(await fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body), credentials: "same-origin" }));
}

/** Calls `changed({run, parts})` when runs change, and `state("live" | "lost")`. Reconnects if the browser gives up. */
export function listen(changed, state) {
  if (answers) return state("exported");
  let wait = 1000;
  const open = () => {
    const source = new EventSource("/api/events");
    source.onopen = () => {
      wait = 1000;
      state("live");
    };
    source.addEventListener("changed", (event) => changed(JSON.parse(event.data)));
    for (const type of ["runs", "reload"]) source.addEventListener(type, () => changed({}));
    source.onerror = () => {
      state("lost");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(open, wait);
      wait = Math.min(15000, wait * 2);
    };
  };
  open();
}
