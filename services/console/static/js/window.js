// Window: the training queue as cells, with head and edge; a cell shows its group.

import { css, fill, h, text } from "./dom.js";
import { count, number } from "./format.js";
import { get, live } from "./live.js";

const PHASES = {
  q: ["queued", "--queued", "waits for a runner"],
  r: ["running", "--running", "rollouts are sampled"],
  c: ["complete, inside", "--complete", "a trainer may take it"],
  o: ["complete, outside", "--outside", "waits for the window"],
  a: ["taken for the next batch", "--taken", "complete, and the head has passed it"],
  b: ["in a batch", "--batched", "a trainer works on it"],
  t: ["trained", "--trained", "an optimizer step used it"],
  x: ["tombstoned", "--tombstoned", "dropped, with a reason"],
  "-": ["gone", "--gone", "settled, no longer in memory"],
};
const GAP = 3;

export function show(root, context, words) {
  const state = { queue: null, counts: null, at: null, chosen: words[0] ? Number(words[0]) : null, columns: 1, size: 13, shown: "" };
  const sub = h("span", { class: "sub" });
  const problem = h("p", { class: "note bad", hidden: true });
  const legend = h("ul", { class: "legend", "aria-label": "States of groups" });
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Positions of the training queue", "aria-describedby": "cell-help" });
  const spoken = h("p", { class: "small muted", "aria-live": "polite" });
  const side = h("aside", { class: "panel side", "aria-label": "Group" });
  const reasons = h("section", { class: "panel", hidden: true });
  fill(
    root,
    h("div", { class: "head" }, h("h1", {}, "Window"), sub),
    problem,
    h("div", { class: "panel" }, legend),
    h("div", { class: "split" }, h("div", { class: "panel cells" }, canvas, h("p", { class: "small muted", id: "cell-help" }, "Click a cell, or move with the arrow keys and press Enter. The window is on a colored ground, between head and edge."), spoken), side),
    reasons,
  );
  help();

  function help() {
    fill(side, h("h2", {}, "Group"), h("p", { class: "muted small" }, "Choose a cell to see its group: its rollouts, its batch, the step that trained it, or why it was dropped."));
  }

  function phaseAt(index) {
    const { first, phases, head, edge } = state.queue;
    const letter = phases[index - first];
    if (letter !== "c") return letter;
    return index < head ? "a" : index < edge ? "c" : "o";
  }

  function draw() {
    if (!state.queue) return;
    const width = Math.floor(canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft));
    if (width < 20) return;
    const { first, phases, head, edge } = state.queue;
    // A short queue has larger cells.
    const size = phases.length <= 600 ? 22 : phases.length <= 2400 ? 16 : 11;
    const step = size + GAP;
    const columns = Math.max(8, Math.floor((width + GAP) / step));
    const rows = Math.max(1, Math.ceil(phases.length / columns));
    const scale = devicePixelRatio || 1;
    const height = rows * step + 4;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    state.columns = columns;
    state.size = size;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const colors = Object.fromEntries(Object.entries(PHASES).map(([letter, [, name]]) => [letter, css(name)]));
    const place = (index) => [((index - first) % columns) * step + 2, Math.floor((index - first) / columns) * step + 2];
    const accent = css("--accent");
    // The window's ground, row by row.
    pen.fillStyle = css("--ground");
    for (let index = Math.max(head, first); index < Math.min(edge, first + phases.length); index += 1) {
      const [x, y] = place(index);
      pen.fillRect(x - 2, y - 2, step + 1, step + 1);
    }
    for (let index = first; index < first + phases.length; index += 1) {
      const [x, y] = place(index);
      pen.fillStyle = colors[phaseAt(index)] || colors["-"];
      pen.beginPath();
      pen.roundRect(x, y, size, size, 3);
      pen.fill();
    }
    pen.strokeStyle = accent;
    pen.lineWidth = 2;
    for (const [index, side] of [[head, 0], [edge - 1, size]]) {
      if (index < first || index >= first + phases.length) continue;
      const [x, y] = place(index);
      pen.beginPath();
      pen.moveTo(x + side + (side ? 1.5 : -1.5), y - 2);
      pen.lineTo(x + side + (side ? 1.5 : -1.5), y + size + 2);
      pen.stroke();
    }
    for (const [index, color] of [[state.chosen, css("--ink")], [document.activeElement === canvas ? state.at : null, accent]]) {
      if (index === null || index < first || index >= first + phases.length) continue;
      const [x, y] = place(index);
      pen.strokeStyle = color;
      pen.beginPath();
      pen.roundRect(x - 1, y - 1, size + 2, size + 2, 4);
      pen.stroke();
    }
  }

  function describe() {
    const { first, phases, head, edge, next } = state.queue;
    const tally = Object.fromEntries(Object.keys(PHASES).map((letter) => [letter, 0]));
    for (let index = first; index < first + phases.length; index += 1) tally[phaseAt(index)] += 1;
    fill(legend, Object.entries(PHASES).map(([letter, [name, color, meaning]]) => h("li", { title: meaning }, h("i", { class: "swatch", vars: { "--swatch": `var(${color})` } }), name, h("b", {}, number(tally[letter])))));
    const rest = next - (first + phases.length);
    text(sub, `H ${head} · edge ${edge} · ${count(next, "position")}${first ? `, shown from ${first}` : ""}${rest > 0 ? `, ${number(rest)} more behind` : ""}`);
    canvas.setAttribute("aria-label", `Training queue: head ${head}, edge ${edge}, ${tally.r} running, ${tally.c} complete inside, ${tally.b} in batches`);
  }

  function place(group) {
    return group.inside ? "c" : group.taken ? "a" : "o";
  }

  async function choose(index) {
    state.chosen = index;
    history.replaceState(null, "", `#/window/${index}`);
    draw();
    await look();
  }

  async function look() {
    const index = state.chosen;
    if (index === null) return;
    try {
      const group = await get(`/api/queue/${index}`);
      if (state.chosen === index) card(group);
    } catch (error) {
      if (state.chosen !== index) return;
      state.shown = "";
      fill(side, h("h2", {}, `Position ${index}`), h("p", { class: "note" }, error.message));
    }
  }

  function card(group) {
    const key = JSON.stringify(group);
    if (key === state.shown) return;
    state.shown = key;
    const letter = { queued: "q", running: "r", complete: place(group), batched: "b", trained: "t", tombstoned: "x" }[group.phase];
    const [name, color] = PHASES[letter];
    const facts = [["Domain", group.domain], ["Scaffold", group.scaffold], ["Pool shard", group.pool_shard], group.batch_id && ["Batch", group.batch_id], group.step && ["Trained in step", String(group.step)], group.reason && ["Reason", group.reason], group.failures && ["Failures", String(group.failures)]].filter((one) => one && one[1]);
    const rollouts = [...Array(group.sealed).fill("sealed"), ...Array(group.leased).fill("leased")];
    while (rollouts.length < Math.min(group.group_size, 256)) rollouts.push("");
    fill(
      side,
      h("div", { class: "head" }, h("h2", {}, `Position ${group.queue_index}`), h("span", { class: "badge" }, h("i", { class: "swatch", vars: { "--swatch": `var(${color})` } }), name)),
      h("p", { class: "mono small" }, group.task_id),
      h("div", { class: "section" }, h("dl", { class: "facts" }, facts.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]))),
      h("div", { class: "section" }, h("h3", {}, `${group.sealed} of ${count(group.group_size, "rollout")} sealed${group.leased ? `, ${group.leased} running` : ""}${group.waiting ? `, ${group.waiting} wait after a failure` : ""}`), h("div", { class: "dots", role: "img", "aria-label": `${group.sealed} sealed, ${group.leased} running` }, rollouts.map((one) => h("i", { class: one })))),
      group.trajectories.length || group.open.length ? h("div", { class: "section" }, h("h3", {}, "Trajectories"), h("ul", { class: "list" }, [...group.trajectories.map((id) => [id, ""]), ...group.open.map((id) => [id, "running"])].slice(0, 64).map(([id, more]) => h("li", {}, h("a", { href: `#/trajectories/${encodeURIComponent(id)}` }, h("span", { class: "mono" }, id), h("span", { class: "muted" }, more)))))) : null,
    );
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const step = state.size + GAP;
    const column = Math.floor((event.clientX - box.left - 2) / step);
    const row = Math.floor((event.clientY - box.top - 2) / step);
    if (!state.queue || column < 0 || column >= state.columns) return null;
    const index = state.queue.first + row * state.columns + column;
    return index < state.queue.first + state.queue.phases.length ? index : null;
  }

  function say(index) {
    const letter = phaseAt(index);
    text(spoken, `Position ${index}: ${(PHASES[letter] || PHASES["-"])[0]}`);
  }

  canvas.addEventListener("click", (event) => {
    const index = under(event);
    if (index === null) return;
    state.at = index;
    choose(index);
  });
  canvas.addEventListener("mousemove", (event) => {
    const index = under(event);
    if (index !== null) say(index);
  });
  canvas.addEventListener("focus", () => {
    if (state.queue && state.at === null) state.at = Math.min(state.queue.head, state.queue.first + Math.max(0, state.queue.phases.length - 1));
    draw();
  });
  canvas.addEventListener("blur", draw);
  canvas.addEventListener("keydown", (event) => {
    if (!state.queue) return;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: state.columns, ArrowUp: -state.columns, Home: -Infinity, End: Infinity };
    const { first, phases } = state.queue;
    if (event.key in moves && phases.length) {
      state.at = Math.max(first, Math.min(first + phases.length - 1, (state.at ?? first) + moves[event.key]));
      say(state.at);
      draw();
    } else if ((event.key === "Enter" || event.key === " ") && state.at !== null) choose(state.at);
    else return;
    event.preventDefault();
  });

  const watcher = new ResizeObserver(draw);
  watcher.observe(canvas.parentElement);
  document.addEventListener("theme", draw);
  const close = live(["queue", "overview"], {
    queue(event) {
      problem.hidden = !event.error;
      text(problem, event.error);
      if (!event.state) return;
      const letter = state.chosen !== null && state.queue ? phaseAt(state.chosen) : null;
      state.queue = event.state;
      describe();
      draw();
      if (state.chosen !== null && (letter !== phaseAt(state.chosen) || phaseAt(state.chosen) === "r")) look();
    },
    overview(event) {
      const found = event.state?.scheduler?.tombstones || [];
      reasons.hidden = !found.length;
      fill(reasons, h("h2", {}, "Reasons of tombstones"), h("div", { class: "section" }, h("ul", { class: "list" }, found.map((one) => h("li", { class: "row" }, h("span", {}, one.reason), h("b", {}, number(one.groups)))))));
    },
  }, context.denied);
  if (state.chosen !== null) look();
  return () => {
    close();
    watcher.disconnect();
    document.removeEventListener("theme", draw);
  };
}
