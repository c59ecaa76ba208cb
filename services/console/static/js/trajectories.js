// Trajectories: the list with its filter, a group side by side, and one trajectory.

import { fill, h, text } from "./dom.js";
import { clock, count, number } from "./format.js";
import { get, live } from "./live.js";
import { showTrajectory } from "./trajectory.js";

const link = (id, turn) => `#/trajectories/${encodeURIComponent(id)}${turn === undefined ? "" : `/${turn}`}`;
const FIELDS = ["text", "domain", "state", "min_reward", "max_reward", "min_version", "max_version", "reward_name", "tag", "scaffold", "user", "where"];
const LIVE_ROWS = 200;
// Conditions that a live row does not show: a list with one is read once.
const HIDDEN = ["text", "reward_name", "tag", "scaffold", "user", "where"];

export function show(root, context, words) {
  if (words[0] === "group") return showGroup(root, words[1] || "");
  if (words[0] === "find") return showList(root, context, words[1]);
  if (words[0]) return showTrajectory(root, words[0], words[1]);
  return showList(root, context);
}

export function outcome(value) {
  if (value === null || value === undefined) return h("span", { class: "muted" }, "–");
  const kind = value >= 1 - 1e-6 ? "good" : value <= 0 ? "bad" : "warn";
  return h("span", { class: `badge ${kind}` }, number(value, 2));
}

// An excerpt with the text that was searched for in bold.
function marked(excerpt, words) {
  const at = excerpt.toLowerCase().indexOf(words.toLowerCase());
  if (at < 0) return [excerpt];
  return [excerpt.slice(0, at), h("mark", {}, excerpt.slice(at, at + words.length)), excerpt.slice(at + words.length)];
}

function showList(root, context, wanted) {
  const state = { rows: [], query: {}, asked: 0, next: "" };
  const inputs = {
    domain: h("input", { name: "domain", size: 12, list: "domains" }),
    state: h("select", { name: "state" }, h("option", { value: "" }, "any"), ["sealed", "abandoned", "open"].map((one) => h("option", { value: one }, one))),
    min_reward: h("input", { name: "min_reward", type: "number", step: "any" }),
    max_reward: h("input", { name: "max_reward", type: "number", step: "any" }),
    min_version: h("input", { name: "min_version", type: "number", min: 0 }),
    max_version: h("input", { name: "max_version", type: "number", min: 0 }),
    text: h("input", { name: "text", type: "search", size: 30, placeholder: "in messages, reasoning and calls" }),
    reward_name: h("input", { name: "reward_name", size: 12, placeholder: "outcome" }),
    tag: h("input", { name: "tag", size: 12 }),
    scaffold: h("input", { name: "scaffold", size: 12 }),
    user: h("input", { name: "user", size: 12 }),
    where: h("input", { name: "where", size: 20, placeholder: "repository=a/b" }),
  };
  for (const [name, value] of new URLSearchParams(wanted || "")) if (inputs[name]) inputs[name].value = value;
  const known = h("datalist", { id: "domains" });
  inputs.domain.setAttribute("list", "domains");
  const find = h("input", { name: "id", size: 24, placeholder: "task, or task:0:0", "aria-label": "Task or trajectory id" });
  const form = h(
    "form",
    { class: "panel filter" },
    h("label", { class: "search" }, "Text", inputs.text),
    h("label", {}, "Domain", inputs.domain, known),
    h("label", {}, "State", inputs.state),
    h("label", {}, "Reward from", inputs.min_reward),
    h("label", {}, "to", inputs.max_reward),
    h("label", {}, "Weights from", inputs.min_version),
    h("label", {}, "to", inputs.max_version),
    h("details", { class: "more", open: ["reward_name", "tag", "scaffold", "user", "where"].some((name) => inputs[name].value) }, h("summary", {}, "More conditions"), h("div", { class: "filter" },
      h("label", {}, "Name of the reward", inputs.reward_name),
      h("label", {}, "Tag", inputs.tag),
      h("label", {}, "Scaffold", inputs.scaffold),
      h("label", {}, "User", inputs.user),
      h("label", {}, "Metadata", inputs.where))),
    h("button", { class: "primary", type: "submit" }, "Filter"),
    h("button", { type: "reset" }, "Clear"),
  );
  const open = h("form", { class: "open" }, find, h("button", { type: "submit" }, "Open"));
  const sub = h("span", { class: "sub" }, "reading the pool");
  const problem = h("p", { class: "note bad", hidden: true, role: "alert" });
  const body = h("tbody");
  const table = h("table", { class: "rows" }, h("thead", {}, h("tr", {}, ["Trajectory", "Domain", "State", "Outcome", "Turns", "Sampled", "Weights", "Closed", "Group"].map((one) => h("th", { scope: "col", class: ["Turns", "Sampled", "Weights"].includes(one) ? "num" : null }, one)))), body);
  const empty = h("p", { class: "empty", hidden: true }, "No trajectory matches.");
  const further = h("button", { type: "button", hidden: true, onclick: () => read(true) }, "Search further");
  fill(root, h("div", { class: "head" }, h("h1", {}, "Trajectories"), sub, open), form, problem, h("div", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Trajectories" }, table, empty), h("p", {}, further));

  function row(one, kind = null) {
    const versions = one.versions[0] < 0 ? "" : one.versions[0] === one.versions[1] ? `v${one.versions[0]}` : `v${one.versions[0]}–${one.versions[1]}`;
    const components = one.rewards.filter((each) => each.kind !== "outcome");
    return h(
      "tr",
      { class: kind },
      h("td", {}, one.freed ? h("span", { class: "mono" }, one.id) : h("a", { class: "mono", href: link(one.id, one.turn) }, one.id), one.excerpt ? h("p", { class: "small excerpt" }, ...marked(one.excerpt, state.query.text), h("span", { class: "muted" }, ` turn ${one.turn}`)) : null),
      h("td", {}, one.domain),
      h("td", {}, one.state, one.freed ? h("span", { class: "muted" }, " freed") : null),
      h("td", {}, outcome(one.outcome), components.length ? h("span", { class: "muted small" }, ` ${components.map((each) => `${each.name} ${number(each.value)}`).slice(0, 3).join(", ")}`) : null, one.reason ? h("span", { class: "muted small" }, ` ${one.reason.slice(0, 120)}`) : null),
      h("td", { class: "num" }, number(one.turns)),
      h("td", { class: "num" }, number(one.sampled_tokens)),
      h("td", { class: "num" }, versions),
      h("td", { class: "when" }, clock(one.closed)),
      h("td", {}, h("a", { class: "small", href: `#/trajectories/group/${encodeURIComponent(one.task_id)}`, "aria-label": `Group of ${one.task_id}` }, "open")),
    );
  }

  function draw() {
    fill(body, state.rows.slice(0, state.query.text ? 2000 : LIVE_ROWS).map((one) => row(one)));
    empty.hidden = state.rows.length > 0;
  }

  async function read(more = false) {
    const asked = ++state.asked;
    state.query = Object.fromEntries(FIELDS.map((name) => [name, inputs[name].value.trim()]).filter(([, value]) => value));
    const { text: words, ...filter } = state.query;
    if (!more) state.next = "";
    further.hidden = true;
    if (words) text(sub, "searching the messages");
    try {
      const found = await get(words ? `/api/search?${new URLSearchParams({ ...filter, text: words, after: state.next })}` : `/api/trajectories?${new URLSearchParams(filter)}`);
      if (asked !== state.asked) return;
      problem.hidden = true;
      state.rows = more ? [...state.rows, ...found.rows] : found.rows;
      state.next = found.next || "";
      further.hidden = !state.next;
      const damaged = found.damaged.length ? `, ${found.damaged.length} damaged` : "";
      text(sub, words
        ? `${count(state.rows.length, "match", "matches")}${state.next ? " so far" : ""}${damaged}${found.freed ? `, ${count(found.freed, "freed trajectory", "freed trajectories")} not searched` : ""}`
        : `${found.complete ? "" : "newest "}${count(found.rows.length, "trajectory", "trajectories")}${damaged}${isLive() ? ", live" : ""}`);
    } catch (error) {
      if (asked !== state.asked) return;
      problem.hidden = false;
      text(problem, error.message);
      text(sub, "");
    }
    draw();
  }

  const isLive = () => !HIDDEN.some((name) => state.query[name]);

  function fits(one) {
    const { query } = state;
    const [low, high] = one.versions;
    return isLive() && (!query.domain || one.domain === query.domain)
      && (!query.state || one.state === query.state)
      && (!query.min_reward || (one.outcome !== null && one.outcome >= Number(query.min_reward)))
      && (!query.max_reward || (one.outcome !== null && one.outcome <= Number(query.max_reward)))
      && (!query.min_version || high >= Number(query.min_version))
      && (!query.max_version || (low >= 0 && low <= Number(query.max_version)));
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); read(); });
  form.addEventListener("reset", () => setTimeout(() => read()));
  open.addEventListener("submit", (event) => {
    event.preventDefault();
    const id = find.value.trim();
    if (id) location.hash = /:\d+:\d+$/.test(id) ? link(id) : `#/trajectories/group/${encodeURIComponent(id)}`;
  });
  const close = live(["closes", "overview"], {
    closes(event) {
      const closed = event.rows.filter(fits).reverse();
      if (!closed.length) return;
      const ids = new Set(closed.map((one) => one.id));
      // Other rows stay: a run closes many trajectories per second, and a replaced row loses a press of its link.
      [...body.children].forEach((each, at) => (ids.has(state.rows[at].id) ? each.remove() : each.classList.remove("fresh")));
      body.prepend(...closed.map((one) => row(one, "fresh")));
      while (body.childElementCount > LIVE_ROWS) body.lastElementChild.remove();
      state.rows = [...closed, ...state.rows.filter((one) => !ids.has(one.id))].slice(0, LIVE_ROWS);
      empty.hidden = true;
    },
    overview(event) {
      const names = (event.state?.scheduler?.domains || []).map((one) => one.domain);
      if (names.length !== known.childElementCount) fill(known, names.map((one) => h("option", { value: one })));
    },
  }, context.denied);
  read();
  return close;
}

// The rollouts of one task, each a column: rewards, advantage, and what was said.
function showGroup(root, task) {
  const stop = new AbortController();
  const sub = h("span", { class: "sub" });
  const columns = h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "Rollouts" });
  fill(root, h("p", { class: "small" }, h("a", { href: "#/trajectories" }, "Trajectories")), h("div", { class: "head" }, h("h1", { class: "mono" }, task), sub), columns);

  async function read() {
    const group = await get(`/api/groups/${encodeURIComponent(task)}`, stop.signal);
    const outcomes = group.rows.map((one) => one.outcome).filter((one) => one !== null);
    const mean = outcomes.length ? outcomes.reduce((a, b) => a + b, 0) / outcomes.length : null;
    text(sub, `${count(group.rows.length, "attempt")}, mean outcome ${number(mean, 2)} · advantage: outcome and process at default weights, less the group's mean`);
    const cards = group.rows.map((one) => {
      const said = h("div", { class: "said" });
      const advantage = one.advantages?.[0];
      const card = h(
        "section",
        { class: "panel rollout" },
        h("h2", {}, one.freed ? h("span", { class: "mono" }, one.id.slice(task.length + 1)) : h("a", { href: link(one.id), class: "mono" }, `rollout ${one.id.slice(task.length + 1)}`)),
        h("dl", { class: "facts" }, h("dt", {}, "Outcome"), h("dd", {}, outcome(one.outcome)), h("dt", {}, "Advantage"), h("dd", {}, number(advantage, 3)), h("dt", {}, "Turns"), h("dd", {}, `${number(one.turns)}, ${count(one.sampled_tokens, "token")}`), h("dt", {}, "State"), h("dd", {}, one.state, one.reason ? `: ${one.reason.slice(0, 200)}` : "")),
        said,
      );
      return { one, said, card };
    });
    fill(columns, cards.map(({ card }) => card));
    for (const { one, said } of cards.filter((each) => !each.one.freed).slice(0, 16)) {
      try {
        const whole = await get(`/api/trajectories/${encodeURIComponent(one.id)}`, stop.signal);
        fill(said, whole.turns.slice(0, 40).map((turn) => h("div", { class: "brief" }, h("a", { href: link(one.id, turn.index), class: "small" }, `turn ${turn.index}`), turn.parse_error ? h("span", { class: "badge bad" }, "parse failure") : null, turn.messages.filter((each) => each.answer).map((each) => h("p", {}, [each.reasoning, each.content, ...each.calls.map((call) => `${call.name}(${call.arguments})`)].filter(Boolean).join("\n").slice(0, 600))))));
      } catch (error) {
        if (stop.signal.aborted) return;
        fill(said, h("p", { class: "note" }, error.message));
      }
    }
  }

  read().catch((error) => {
    if (!stop.signal.aborted) fill(columns, h("p", { class: "note bad" }, error.message));
  });
  return () => stop.abort();
}
