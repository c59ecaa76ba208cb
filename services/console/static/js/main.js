// The shell: navigation, theme, login. Each page is a module with `show(root, context, words)`, which
// returns the function that ends it.

import { fill, h, text } from "./dom.js";
import { get } from "./live.js";
import * as overview from "./overview.js";
import * as services from "./services.js";
import * as tasks from "./tasks.js";
import * as trajectories from "./trajectories.js";
import * as weights from "./weights.js";
import * as queue from "./window.js";

const PAGES = [
  ["overview", "Overview", overview],
  ["window", "Window", queue],
  ["trajectories", "Trajectories", trajectories],
  ["tasks", "Tasks", tasks],
  ["weights", "Weights", weights],
  ["services", "Services", services],
];
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const dark = matchMedia("(prefers-color-scheme: dark)");
let end = () => {};
let session = null;

function theme() {
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* storage is off */ }
  return chosen || (dark.matches ? "dark" : "light");
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  document.dispatchEvent(new Event("theme"));
}

document.getElementById("theme").addEventListener("click", () => {
  try { localStorage.setItem("theme", theme() === "dark" ? "light" : "dark"); } catch { /* storage is off */ }
  applyTheme();
});
dark.addEventListener("change", applyTheme);

async function route() {
  end();
  end = () => {};
  const words = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [name, title, page] = PAGES.find(([known]) => known === words[0]) || PAGES[0];
  fill(nav, PAGES.map(([each, label]) => h("a", { href: `#/${each}`, "aria-current": each === name ? "page" : null }, label)));
  document.title = `${title} · Forge console`;
  fill(main);
  if (session === null) session = await get("/api/session");
  text(document.getElementById("cluster"), session.cluster === "default" ? "" : session.cluster);
  document.getElementById("logout").hidden = !session.subject || !session.login_needed;
  if (session.login_needed && !session.subject) {
    login();
    return;
  }
  end = page.show(main, { denied, maySteer: session.may_steer }, words.slice(1)) || (() => {});
}

async function denied() {
  const now = await get("/api/session").catch(() => session);
  if (now.login_needed && !now.subject) {
    session = now;
    route();
  }
}

function login() {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: false });
  const problem = h("p", { class: "note bad", hidden: true, role: "alert" });
  const form = h(
    "form",
    { class: "panel login" },
    h("h1", {}, "Log in"),
    h("p", { class: "muted" }, "With a token of ", h("code", {}, "forge token issue"), ". viewer reads curves and the queue, operator lists trajectories and changes things, admin reads trajectories."),
    h("label", { htmlFor: "token" }, "Token", field),
    problem,
    h("button", { class: "primary", type: "submit" }, "Log in"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const response = await fetch("/api/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token: field.value }) });
    if (response.ok) {
      session = null;
      route();
    } else {
      problem.hidden = false;
      text(problem, (await response.json()).error);
    }
  });
  fill(main, form);
  field.focus();
}

document.getElementById("logout").addEventListener("click", async () => {
  await fetch("/api/logout", { method: "POST" });
  session = null;
  route();
});

addEventListener("hashchange", route);
applyTheme();
route();
