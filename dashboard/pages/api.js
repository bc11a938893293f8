// What the server says: data by address, and word of what has changed. A page that was exported to one file answers from itself.

/** The run, or the sample, is not there any more. */
export class Gone extends Error {}

const exported = document.getElementById("exported");
const answers = exported && JSON.parse(exported.textContent);
export const isExported = Boolean(answers);

/** The address of what is asked, its parameters in order of their names; empty ones are left out. */
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

/** What the server says of `name`, such as "curves", for these parameters. Throws `Gone`, or an error whose message is a sentence. */
export async function get(name, values, signal) {
  const path = address(name, values);
  if (answers) {
    if (path in answers) return answers[path];
    const whole = address(name, { ...values, start: null, end: null, first: null, last: null }); // a page shows a stretch of it by itself
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

/** Asks the server to do something. A form of another page cannot send this header. */
export async function post(name, body) {
  if (answers) throw new Error("An exported page has no server to ask.");
  const headers = { "content-type": "application/json", "x-weft-stop": "yes" };
  return answer(await fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body), credentials: "same-origin" }));
}

/** Calls `changed({run, parts})` as runs go on, and `state("live" | "lost")`. The browser reconnects by itself; where it gives up, we try again. */
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
