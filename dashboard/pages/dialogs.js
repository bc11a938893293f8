// Two dialogs: the list of keys, and the confirmation to stop a run.
import { post } from "./api.js";
import { h } from "./dom.js";

function open(...children) {
  const dialog = h("dialog", { class: "panel", on: { close: () => dialog.remove(), click: (event) => event.target === dialog && dialog.close() } }, h("div", { class: "inner" }, children));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

const keys = (rows) => h("dl", { class: "keys" }, rows.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));

export function showHelp(pages, own) {
  const everywhere = [...pages.map((title, place) => [String(place + 1), title]), ["0", "All runs"], ["/", "search"], ["Tab", "from place to place"], ["?", "this list"], ["Esc", "leave a field or this list"]];
  const here = Object.entries(own).map(([key, { what }]) => [key.replace("Arrow", ""), what]);
  const close = h("button", { on: { click: () => dialog.close() } }, "Close");
  const dialog = open(h("h2", {}, "Keys"), here.length ? [h("h3", {}, "On this page"), keys(here), h("h3", {}, "Everywhere")] : null, keys(everywhere), close);
}

/** Confirms a request to stop a run, which writes a checkpoint if it makes any. */
export function stopDialog(run, say) {
  const word = h("p", { role: "status" });
  const stop = async () => {
    yes.disabled = true;
    try {
      await post("stop", { run });
      say("The run was asked to stop.");
      dialog.close();
    } catch (error) {
      word.textContent = error.message;
      yes.disabled = false;
    }
  };
  const yes = h("button", { class: "danger", on: { click: stop } }, "Stop the run");
  const no = h("button", { autofocus: true, on: { click: () => dialog.close() } }, "Let it run");
  const dialog = open(h("h2", {}, `Stop ${run}?`), h("p", {}, "The run ends after the current step, as with `weft stop`. It can be resumed from its last checkpoint."), word, h("p", { class: "row" }, no, yes));
}
