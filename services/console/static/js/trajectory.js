// One trajectory: the context tree, the chosen turn, its tokens.

import { fill, h } from "./dom.js";
import { clock, count, number, seconds } from "./format.js";
import { get } from "./live.js";
import { TokenView } from "./tokens.js";

const ROW = 34;
const LANE = 16;
const LANES = 12;
const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Each reward component over the turns, with its running sum.
function rewardTable(whole) {
  const names = [...new Set(whole.rewards.map((one) => one.name))].sort();
  const last = whole.turns.length - 1;
  const turns = [...new Set(whole.rewards.map((one) => (one.turn < 0 ? last : one.turn)))].sort((a, b) => a - b).slice(0, 400);
  const rows = names.map((name) => {
    let sum = 0;
    return h("tr", {}, h("th", { scope: "row" }, name), turns.map((turn) => {
      const own = whole.rewards.filter((one) => one.name === name && (one.turn < 0 ? last : one.turn) === turn);
      sum += own.reduce((total, one) => total + one.value, 0);
      return h("td", { class: "num" }, own.length ? [number(own.reduce((total, one) => total + one.value, 0), 2), h("span", { class: "muted small" }, ` Σ ${number(sum, 2)}`)] : h("span", { class: "muted" }, "·"));
    }));
  });
  const head = h("tr", {}, h("th", { scope: "col" }, "Reward"), turns.map((turn) => h("th", { scope: "col", class: "num" }, h("a", { href: `#/trajectories/${encodeURIComponent(whole.id)}/${turn}` }, `turn ${turn}`))));
  return h("section", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Rewards over turns" }, h("table", { class: "rows" }, h("caption", {}, "Rewards over turns"), h("thead", {}, head), h("tbody", {}, rows)));
}

export function showTrajectory(root, id, wanted) {
  const stop = new AbortController();
  const state = { whole: null, chosen: null };
  const task = id.split(":")[0];
  const sub = h("span", { class: "sub" });
  const tree = h("div", { class: "panel tree", role: "group", "aria-label": "Context tree" });
  const turn = h("div", { class: "turn" });
  const place = h("section", { class: "panel" });
  const body = h("div", { class: "split trajectory" }, tree, h("div", { class: "stack" }, turn, place));
  fill(root, h("p", { class: "small" }, h("a", { href: "#/trajectories" }, "Trajectories"), " / ", h("a", { href: `#/trajectories/group/${encodeURIComponent(task)}` }, task)), h("div", { class: "head" }, h("h1", { class: "mono" }, id), sub), body);
  const tokens = new TokenView(place, (index) => state.whole?.turns[index]?.advantage ?? null);

  async function read() {
    state.whole = await get(`/api/trajectories/${encodeURIComponent(id)}`, stop.signal);
    const { whole } = state;
    const sampled = whole.turns.reduce((sum, one) => sum + one.sampled, 0);
    fill(sub, [whole.domain, whole.state, count(whole.branches.length, "branch", "branches"), count(whole.turns.length, "turn"), count(sampled, "sampled token"), whole.closed ? clock(whole.closed) : ""].filter(Boolean).join(" · "), " ", ...whole.rewards.filter((one) => one.turn < 0).map((one) => h("span", { class: "badge" }, `${one.name} ${number(one.value, 2)}`)));
    if (whole.rewards.some((one) => one.turn >= 0)) root.insertBefore(rewardTable(whole), body);
    if (whole.reason) root.insertBefore(h("p", { class: "note" }, whole.reason), body);
    if (!whole.turns.length) {
      fill(body, h("p", { class: "empty panel" }, "This trajectory has no turn."));
      return;
    }
    draw();
    const first = wanted === undefined ? whole.turns.length - 1 : Number(wanted);
    choose(whole.turns[first] ? first : 0, false);
  }

  // As a graph of commits: one row per turn, one lane per branch.
  function draw() {
    const { turns, branches } = state.whole;
    const lane = new Map();
    branches.forEach((members, number_) => members.forEach((index) => lane.set(index, number_)));
    const lanes = Math.min(LANES, branches.length);
    const width = lanes * LANE + 8;
    const x = (index) => (lane.get(index) % LANES) * LANE + 12;
    const y = (index) => index * ROW + ROW / 2;
    const graph = shape("svg", { width, height: turns.length * ROW, "aria-hidden": "true", class: "graph" });
    for (const one of turns) {
      if (one.parent >= 0) {
        const [fromX, fromY, toX, toY] = [x(one.parent), y(one.parent), x(one.index), y(one.index)];
        const path = fromX === toX ? `M${fromX} ${fromY}V${toY}` : `M${fromX} ${fromY}C${fromX} ${fromY + ROW} ${toX} ${toY - ROW} ${toX} ${toY}`;
        const line = shape("path", { d: path, fill: "none", "stroke-width": "2" });
        line.style.stroke = `var(${COLORS[lane.get(one.index) % COLORS.length]})`;
        graph.append(line);
      }
    }
    for (const one of turns) {
      const dot = shape("circle", { cx: x(one.index), cy: y(one.index), r: one.aside || one.other_model ? 3.5 : 5, "stroke-width": "2" });
      const color = `var(${COLORS[lane.get(one.index) % COLORS.length]})`;
      dot.style.stroke = color;
      dot.style.fill = one.aside || one.other_model ? "var(--panel)" : color;
      graph.append(dot);
    }
    const rows = turns.map((one) => {
      const calls = one.messages.filter((each) => each.answer).reduce((sum, each) => sum + each.calls.length, 0);
      return h(
        "li",
        {},
        h(
          "button",
          { type: "button", class: "step", "data-turn": one.index, onclick: () => choose(one.index, true) },
          h("span", {}, `turn ${one.index}`),
          one.agent ? h("span", { class: "badge" }, `agent ${one.agent}`) : null,
          one.action ? h("span", { class: "badge warn" }, one.action) : null,
          one.aside ? h("span", { class: "badge" }, "side call") : null,
          one.other_model ? h("span", { class: "badge" }, one.other_model) : null,
          one.parse_error ? h("span", { class: "badge bad" }, "parse failure") : null,
          h("span", { class: "muted" }, `${calls ? `${count(calls, "call")}, ` : ""}${number(one.sampled)} tok`),
        ),
      );
    });
    fill(tree, h("h2", {}, "Context tree"), h("div", { class: "lanes" }, graph, h("ol", {}, rows)), h("p", { class: "small muted" }, "A lane is a branch: turns that continue each other. A curve leaves it at a fold, an edit, a fork or a sub-agent."));
  }

  function choose(index, navigate) {
    state.chosen = index;
    if (navigate) history.replaceState(null, "", `#/trajectories/${encodeURIComponent(id)}/${index}`);
    for (const button of tree.querySelectorAll("button.step")) button.setAttribute("aria-pressed", String(Number(button.dataset.turn) === index));
    drawTurn(state.whole.turns[index]);
    tokens.show(id, index);
  }

  function drawTurn(one) {
    const rewards = state.whole.rewards.filter((each) => each.turn === one.index);
    const [queue, prefill, decode, agent] = one.timings;
    const facts = [
      ["Context", `${count(one.context, "token")}, ${number(one.shared)} shared${one.parent >= 0 ? ` with turn ${one.parent}` : ""}, ${number(one.cached)} cached`],
      ["Sampled", `${count(one.sampled, "token")} by ${one.versions[0] < 0 ? "none" : one.versions[0] === one.versions[1] ? `weights v${one.versions[0]}` : `weights v${one.versions[0]} to v${one.versions[1]}`}, ${one.finish}, temperature ${number(one.temperature)}`],
      ["Log-prob", one.mean_logprob === null ? "–" : `mean ${number(one.mean_logprob, 3)}`],
      ["Advantage", number(one.advantage, 3)],
      ["Time", `agent ${seconds(agent)}, queue ${seconds(queue)}, prefill ${seconds(prefill)}, decode ${seconds(decode)}`],
    ];
    fill(
      turn,
      h(
        "section",
        { class: "panel" },
        h("div", { class: "head" }, h("h2", {}, `Turn ${one.index}`), h("a", { class: "small", href: `#/trajectories/${encodeURIComponent(id)}/${one.index}` }, "link"), rewards.map((each) => h("span", { class: "badge" }, `${each.name} ${number(each.value, 2)}`))),
        h("dl", { class: "facts section" }, facts.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)])),
        one.parse_error ? h("div", { class: "section" }, h("h3", {}, "Parse failure"), h("pre", { class: "note bad", tabindex: "0" }, one.parse_error)) : null,
        h("div", { class: "section messages" }, one.messages.length ? one.messages.map(message) : h("p", { class: "muted" }, "No messages on record.")),
      ),
    );
  }

  function message(one) {
    return h(
      "article",
      { class: `message ${["system", "user", "assistant", "tool"].includes(one.role) ? one.role : "other"}${one.answer ? " answer" : ""}` },
      h("h3", {}, one.answer ? "answer" : one.role, one.name ? h("span", { class: "muted" }, ` ${one.name}`) : null),
      one.reasoning ? h("pre", { class: "reasoning" }, one.reasoning) : null,
      one.content ? h("pre", {}, one.content) : null,
      one.calls.map((call) => h("div", { class: "call" }, h("b", { class: "mono" }, call.name), h("pre", {}, call.arguments))),
    );
  }

  read().catch((error) => {
    if (!stop.signal.aborted) fill(body, h("p", { class: "note bad" }, error.message));
  });
  return () => {
    stop.abort();
    tokens.end();
  };
}

