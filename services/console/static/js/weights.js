// Weights: published versions, which worker serves which, the hold; rollback, canary and promotion for operators.

import { confirm } from "./dialog.js";
import { fill, h, text } from "./dom.js";
import { bytes, clock, count, number } from "./format.js";
import { live } from "./live.js";

const v = (version) => `v${version}`;

export function show(root, context) {
  const sub = h("span", { class: "sub" }, "asking the trainer");
  const notes = h("div", { class: "notes", hidden: true });
  const actions = h("div", { class: "open" });
  const versions = h("section", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Versions" });
  const workers = h("section", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Workers" });
  fill(root, h("div", { class: "head" }, h("h1", {}, "Weights"), sub, actions), notes, versions, workers);

  function roll(version) {
    confirm({
      title: `Serve ${v(version)}?`,
      body: h("p", {}, `Every worker serves ${v(version)} until the weights are promoted. Training continues; its publications wait.`),
      action: `Serve ${v(version)}`,
      path: "/api/weights/rollback",
      content: () => ({ weight_version: version }),
    });
  }

  function canary(version) {
    const share = h("input", { type: "number", min: 1, max: 99, step: 1, value: "25", required: true });
    confirm({
      title: `Try ${v(version)} on some workers?`,
      body: h("div", { class: "section" }, h("p", {}, "The others serve the held version, or the one before. Newer publications wait."), h("label", {}, "Share of the workers, in percent", share)),
      action: "Begin the canary",
      path: "/api/weights/canary",
      content: () => ({ weight_version: version, share: Number(share.value) / 100 }),
    });
  }

  function promote(newest) {
    confirm({
      title: "Promote the newest version?",
      body: h("p", {}, `The hold ends: every worker serves the newest version, now ${v(newest)}, and follows publications again.`),
      action: "Promote",
      path: "/api/weights/promote",
      content: () => ({}),
    });
  }

  function mark(one, state) {
    const { hold } = state;
    if (one.weight_version === hold.canary_version) return h("span", { class: "badge warn" }, "canary");
    if (one.weight_version === hold.base_version) return h("span", { class: "badge warn" }, "held");
    if (one.weight_version === state.versions[0].weight_version) return h("span", { class: "badge" }, "newest");
    return null;
  }

  function buttons(one, state) {
    if (!context.maySteer) return [];
    const held = one.weight_version === state.hold.base_version && !state.hold.canary_version;
    const base = one.weight_version === state.hold.base_version;
    return h(
      "td",
      {},
      h(
        "div",
        { class: "buttons" },
        held ? null : h("button", { type: "button", onclick: () => roll(one.weight_version) }, "Serve", h("span", { class: "unseen" }, ` ${v(one.weight_version)}`)),
        base ? null : h("button", { type: "button", onclick: () => canary(one.weight_version) }, "Canary", h("span", { class: "unseen" }, ` of ${v(one.weight_version)}`)),
      ),
    );
  }

  function headings(names) {
    return h("thead", {}, h("tr", {}, names.map(([name, kind]) => h("th", { scope: "col", class: kind }, name))));
  }

  let last = "";
  function draw(state) {
    const key = JSON.stringify(state);
    if (key === last) return;
    last = key;
    const { hold } = state;
    const newest = state.versions[0]?.weight_version;
    fill(actions, context.maySteer && hold.base_version ? [
      hold.canary_version ? h("button", { type: "button", onclick: () => roll(hold.base_version) }, `Roll back to ${v(hold.base_version)}`) : null,
      h("button", { class: "primary", type: "button", onclick: () => promote(newest) }, "Promote"),
    ] : []);
    const columns = [["Version", null], ["State", null], ["Step", "num"], ["Published", null], ["Size", "num"], ["Digest", null], ["Reward", "num"], ["Log-prob gap", "num"], ["Workers", "num"]];
    if (context.maySteer) columns.push(["Change", null]);
    fill(versions, h("table", { class: "rows" }, h("caption", {}, "Versions that the trainer holds"), headings(columns), h("tbody", {}, state.versions.map((one) => h(
      "tr",
      {},
      h("th", { scope: "row", class: "mono" }, v(one.weight_version)),
      h("td", {}, mark(one, state)),
      h("td", { class: "num" }, number(one.step)),
      h("td", { class: "when" }, clock(one.published_unix_s)),
      h("td", { class: "num" }, bytes(one.total_bytes)),
      h("td", { class: "mono" }, one.digest.slice(0, 12)),
      h("td", { class: "num" }, number(one.mean_reward, 3)),
      h("td", { class: "num" }, number(one.logprob_gap, 4)),
      h("td", { class: "num" }, `${state.workers.filter((each) => each.weight_version === one.weight_version).length} of ${state.workers.length}`),
      buttons(one, state),
    )))));
    fill(workers, h("table", { class: "rows" }, h("caption", {}, "Workers"), headings([["Instance", null], ["Role", null], ["Serves", "num"], ["Problem", null]]), h("tbody", {}, state.workers.map((one) => h(
      "tr",
      {},
      h("th", { scope: "row", class: "mono" }, one.instance),
      h("td", {}, one.role),
      h("td", { class: "num" }, v(one.weight_version)),
      h("td", {}, one.weight_version === one.wanted_version ? null : h("span", { class: "badge warn" }, `to serve ${v(one.wanted_version)}`), one.error ? ` ${one.error}` : null),
    )))));
  }

  return live(["weights"], {
    weights(event) {
      const state = event.state;
      const problems = event.error ? [event.error] : [];
      if (state?.hold.base_version) {
        const { hold } = state;
        const what = hold.canary_version ? `Canary: ${count(hold.canary_workers.length, "worker")} ${hold.canary_workers.length === 1 ? "serves" : "serve"} ${v(hold.canary_version)}, the others ${v(hold.base_version)}` : `All workers serve ${v(hold.base_version)}`;
        problems.push(`${what}, by ${hold.subject} since ${clock(hold.since_unix_s)}. Newer versions wait.`);
      }
      notes.hidden = !problems.length;
      fill(notes, problems.map((one) => h("p", { class: "note" }, one)));
      if (!state) return;
      text(sub, state.versions.length ? `newest ${v(state.versions[0].weight_version)}, ${count(state.workers.length, "worker")}` : "no version yet");
      draw(state);
    },
  }, context.denied);
}
