// A dialog that confirms a change. It stays open until the change is done, with the error beside the button.

import { copies, h, text } from "./dom.js";
import { post } from "./live.js";

// `body` is shown; `content` returns the object to send to `path`.
export function confirm({ title, body, action, path, content }) {
  const opener = document.activeElement;
  const problem = h("p", { class: "note bad", hidden: true, role: "alert" });
  const yes = h("button", { class: "primary", type: "button" }, action);
  const no = h("button", { type: "button" }, "Cancel");
  const dialog = h(
    "dialog",
    { class: "panel confirm", "aria-labelledby": "dialog-title" },
    h("h2", { id: "dialog-title" }, title),
    body,
    problem,
    h("div", { class: "buttons" }, no, yes),
  );
  no.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    dialog.remove();
    // An update may have replaced the button behind the open dialog.
    if (!opener.isConnected) copies(document.body, opener)[0]?.focus();
  });
  yes.addEventListener("click", async () => {
    yes.disabled = true;
    problem.hidden = true;
    try {
      await post(path, content());
      dialog.close();
    } catch (error) {
      problem.hidden = false;
      text(problem, error.message);
      yes.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  no.focus();
}
