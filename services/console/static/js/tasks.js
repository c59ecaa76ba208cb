// Tasks and data sets: which tasks a run reads, by domain and by data set, with counts and rewards.

import { fill, h, text } from "./dom.js";
import { count, number } from "./format.js";
import { get, live } from "./live.js";

const PHASES = ["queued", "running", "complete", "batched", "trained", "tombstoned", "evaluated"];
const page = (tag) => `#/tasks/${encodeURIComponent(tag || "-")}`;

export function show(root, context, words) {
  return words[0] ? showSet(root, words[0] === "-" ? "" : words[0]) : showAll(root, context);
}

function heads(names, numbers) {
  return h("thead", {}, h("tr", {}, names.map((one) => h("th", { scope: "col", class: numbers.includes(one) ? "num" : null }, one))));
}

function panel(label) {
  return h("section", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": label, hidden: true });
}

function put(place, label, columns, numbers, rows) {
  place.hidden = !rows.length;
  fill(place, h("table", { class: "rows" }, h("caption", {}, label), heads(columns, numbers), h("tbody", {}, rows)));
}

const value = (content) => h("td", { class: "num" }, content);
const phases = (counts) => PHASES.filter((one) => counts[one]).map((one) => `${number(counts[one])} ${one}`).join(", ");

function showAll(root, context) {
  const sub = h("span", { class: "sub" }, "counting groups");
  const problem = h("p", { class: "note", hidden: true });
  const [domains, sets, held] = ["Domains", "Data sets", "Held-out tasks"].map(panel);
  fill(root, h("div", { class: "head" }, h("h1", {}, "Tasks"), sub), problem, domains, sets, held);
  let evaluation = {};

  function drawDomains(rows) {
    const columns = ["Domain", "Share", "Recent reward", "Held-out reward", "Training groups", "Held-out groups", "Trajectories", "Turns", "Sampled tokens"];
    put(domains, "Domains", columns, columns.slice(1).filter((one) => one !== "Training groups"), rows.map((one) => h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: `#/trajectories/find/${encodeURIComponent(`domain=${one.domain}`)}` }, one.domain)),
      value(one.share === null ? "–" : number(one.share, 2)),
      value(number(one.recent_reward, 3)),
      value(number(evaluation[one.domain]?.mean_reward, 3)),
      h("td", {}, Object.entries(one.groups).map(([state, groups]) => `${number(groups)} ${state}`).join(", ") || "–"),
      value(number(one.held_out_groups)),
      value(`${number(one.sealed)}${one.abandoned ? `, ${number(one.abandoned)} abandoned` : ""}`),
      value(number(one.turns)),
      value(number(one.sampled_tokens)),
    )));
  }

  function drawSets(place, label, rows) {
    const columns = ["Data set", "Domains", "Scaffolds", "Groups", "Rows", "Epochs", "Progress", "Rollouts", "Mean outcome"];
    put(place, label, columns, ["Groups", "Rows", "Epochs", "Rollouts", "Mean outcome"], [...rows].reverse().map((one) => h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { class: "mono", href: page(one.tag) }, one.tag || "without a tag")),
      h("td", {}, one.domains.join(", ")),
      h("td", {}, one.scaffolds.join(", ")),
      value(number(one.groups)),
      value(number(one.rows)),
      value(number(one.epochs)),
      h("td", {}, phases(one.phases)),
      value(number(one.rollouts)),
      value(number(one.mean_outcome, 3)),
    )));
  }

  let state = null;
  return live(["tasks", "overview"], {
    tasks(event) {
      problem.hidden = !event.error;
      text(problem, event.error || "");
      if (!event.state) return;
      state = event.state;
      text(sub, `${count(state.domains.length, "domain")}, ${count(state.data_sets.length, "data set")}${state.complete ? "" : "; data sets of the newest 5,000 groups"}`);
      drawDomains(state.domains);
      drawSets(sets, "Data sets", state.data_sets);
      drawSets(held, "Held-out tasks", state.held_out);
    },
    overview(event) {
      const newest = event.state?.trainer?.evaluations.at(-1) || event.state?.campaign?.["eval-before"];
      if (!newest || JSON.stringify(newest.domains) === JSON.stringify(evaluation)) return;
      evaluation = newest.domains;
      if (state) drawDomains(state.domains);
    },
  }, context.denied);
}

function showSet(root, tag) {
  const stop = new AbortController();
  const sub = h("span", { class: "sub" }, "reading the tasks");
  const place = panel("Tasks");
  fill(root, h("p", { class: "small" }, h("a", { href: "#/tasks" }, "Tasks")), h("div", { class: "head" }, h("h1", { class: "mono" }, tag || "without a tag"), sub), place);
  get(`/api/data_set?${new URLSearchParams({ tag })}`, stop.signal).then((found) => {
    text(sub, `${found.complete ? "" : "the newest "}${count(found.tasks.length, "group")}`);
    const columns = ["Task", "Domain", "Scaffold", "State", "Step", "Rollouts", "Mean outcome", "Outcomes", "Metadata"];
    put(place, "Tasks", columns, ["Step", "Rollouts", "Mean outcome"], found.tasks.map((one) => h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { class: "mono", href: `#/trajectories/group/${encodeURIComponent(one.task_id)}` }, one.task_id)),
      h("td", {}, one.domain),
      h("td", {}, one.scaffold),
      h("td", {}, one.phase, one.reason ? h("span", { class: "muted small" }, ` ${one.reason.slice(0, 120)}`) : null),
      value(one.step ? number(one.step) : "–"),
      value(`${one.rollouts} / ${one.group_size}`),
      value(number(one.mean_outcome, 3)),
      h("td", {}, one.outcomes.map((each) => number(each, 2)).join(" ")),
      h("td", { class: "small" }, Object.entries(one.metadata).map(([key, each]) => `${key}=${each}`).join(", ")),
    )));
  }).catch((error) => {
    if (!stop.signal.aborted) fill(sub, error.message);
  });
  return () => stop.abort();
}
