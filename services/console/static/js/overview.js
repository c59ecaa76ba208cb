// Overview: what is learned, how fast, and how far from the policy that sampled.

import { Chart } from "./charts.js";
import { fill, h, text } from "./dom.js";
import { number, seconds, smooth } from "./format.js";
import { get, live } from "./live.js";

const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const share = () => [0, 1.02];

function tile(label) {
  const value = h("dd", {}, "–");
  const hint = h("dd", { class: "hint" });
  return { element: h("div", { class: "tile" }, h("dt", {}, label), value, hint), set: (shown, more = "") => { text(value, shown); text(hint, more); } };
}

export function show(root, context) {
  const state = { fields: [], rows: [], overview: null };
  const charts = {};
  const multiples = new Map();
  const domains = h("div", { class: "multiples" });
  const title = h("h1", {}, "Overview");
  const sub = h("span", { class: "sub" });
  const bar = h("i");
  const notes = h("div", { class: "notes" });
  const tiles = { step: tile("Step"), reward: tile("Reward"), held: tile("Held-out"), yield: tile("Yield J"), sampled: tile("Sampled tokens/s"), staleness: tile("Staleness"), queue: tile("Groups") };
  tiles.step.element.append(h("dd", { class: "bar" }, bar));

  charts.reward = new Chart("Reward", [
    { label: "step", color: "--c7", width: 1, alpha: 0.45, legend: false },
    { label: "mean of steps", color: "--c0", width: 2.25 },
    { label: "held-out", color: "--accent", dots: true },
  ], { height: 250, range: rewardRange, bounds: () => heldOut().filter((one) => one.high > one.low).map((one) => [one.step, one.low, one.high]) });
  charts.tokens = new Chart("Throughput", [{ label: "trained tokens/s", color: "--c2", width: 1, alpha: 0.5, legend: false }, { label: "trained tokens/s", color: "--c2" }]);
  charts.staleness = new Chart("Staleness, in steps", [{ label: "max", color: "--c7", width: 1.25 }, { label: "mean", color: "--c3" }]);
  charts.entropy = new Chart("Entropy, in nats", [{ label: "entropy", color: "--c5" }]);
  charts.gap = new Chart("Log-prob gap", [{ label: "99th percentile", color: "--c7", width: 1.25 }, { label: "mean", color: "--c1" }, { label: "at least staleness", color: "--c4" }]);
  charts.merge = new Chart("Merge ratio", [{ label: "merge ratio", color: "--c0" }]);
  charts.time = new Chart("Time of a step, in seconds", [{ label: "train", color: "--c2" }, { label: "wait for a batch", color: "--c1" }, { label: "publish", color: "--c7", width: 1.25 }]);
  charts.yield = new Chart("Yield J", [{ label: "J", color: "--accent" }]);

  const components = { names: [], place: h("div", { class: "wide components" }), chart: null };

  charts.reward.element.classList.add("wide");
  for (const name of ["tokens", "staleness", "entropy", "gap", "merge", "time", "yield"]) charts[name].element.classList.add("third");
  fill(
    root,
    h("div", { class: "head" }, title, sub),
    notes,
    h("dl", { class: "tiles" }, Object.values(tiles).map((one) => one.element)),
    h("div", { class: "charts" }, charts.reward.element, h("section", { class: "panel third chart" }, h("header", {}, h("h2", {}, "Reward by domain"), h("span", {}, "dots: held-out")), domains), components.place, charts.tokens.element, charts.staleness.element, charts.entropy.element, charts.gap.element, charts.merge.element, charts.time.element, charts.yield.element),
  );

  // Other runs, which the setting `compare` names.
  const compared = {
    runs: [],
    charts: {},
    columns: [["mean_reward", "Reward of runs"], ["entropy", "Entropy of runs, in nats"], ["staleness_mean", "Staleness of runs, in steps"]],
    element: h("section", { class: "charts", "aria-label": "Runs compared", hidden: true }),
  };
  root.append(compared.element);

  function showCompared(runs) {
    compared.runs = runs.filter((one) => one.rows.length);
    for (const one of runs.filter((each) => each.error)) compared.element.append(h("p", { class: "note wide" }, `${one.name}: ${one.error}`));
    for (const [name, title] of compared.runs.length ? compared.columns : []) {
      const series = ["this run", ...compared.runs.map((one) => one.name)].map((label, index) => ({ label, color: index ? COLORS[index % COLORS.length] : "--accent", width: index ? 1.5 : 2.25 }));
      compared.charts[name] = new Chart(title, series);
      compared.charts[name].element.classList.add("third");
      compared.element.append(compared.charts[name].element);
    }
    compared.element.hidden = !runs.length;
    drawCompared();
  }

  function drawCompared() {
    const own = column("step");
    for (const [name, chart] of Object.entries(compared.charts)) {
      const lines = [[own, smooth(column(name))], ...compared.runs.map((one) => [one.rows.map((row) => row[0]), smooth(one.rows.map((row) => row[one.fields.indexOf(name)]))])];
      const all = [...new Set(lines.flatMap(([steps]) => steps))].sort((a, b) => a - b);
      chart.set([all, ...lines.map(([steps, values]) => {
        const at = new Map(steps.map((step, index) => [step, values[index]]));
        return all.map((step) => at.get(step) ?? null);
      })], `${compared.runs.length + 1} runs`);
    }
  }

  get("/api/compared").then(showCompared).catch(() => {});

  function rewardRange(_, low, high) {
    return low === null || (low >= 0 && high <= 1) ? share() : [low, high];
  }

  // Evaluations of the trainer, and those of `forge run` before and after training.
  function heldOut() {
    const trainer = state.overview?.trainer;
    if (!trainer) return [];
    const points = trainer.evaluations.map((one) => ({ ...one }));
    const campaign = state.overview.campaign || {};
    const steps = new Set(points.map((one) => one.step));
    if (campaign["eval-before"] && !steps.has(0)) points.push({ step: 0, low: 0, high: 0, ...campaign["eval-before"] });
    const last = trainer.max_steps || trainer.step;
    if (campaign["eval-after"] && !steps.has(last)) points.push({ step: last, low: 0, high: 0, ...campaign["eval-after"] });
    return points.sort((a, b) => a.step - b.step);
  }

  function column(name) {
    const index = state.fields.indexOf(name);
    return state.rows.map((row) => row[index]);
  }

  function drawReward() {
    const steps = column("step");
    const held = heldOut();
    const all = [...new Set([...steps, ...held.map((one) => one.step)])].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const heldAt = new Map(held.map((one) => [one.step, one]));
    const spread = (values) => all.map((step) => (at.has(step) ? values[at.get(step)] : null));
    const mean = column("mean_reward");
    const last = mean.length ? smooth(mean).at(-1) : null;
    charts.reward.set(
      [all, spread(mean), spread(smooth(mean)), all.map((step) => heldAt.get(step)?.mean_reward ?? null)],
      last === null ? "" : `now ${number(last, 3)}${held.length ? `, held-out ${number(held.at(-1).mean_reward, 3)}` : ""}`,
    );
    const rewards = state.rows.map((row) => row.at(-1));
    const names = [...new Set([...rewards.flatMap((one) => Object.keys(one)), ...held.flatMap((one) => Object.keys(one.domains || {}))])].sort();
    names.forEach((name, index) => {
      if (!multiples.has(name)) {
        const color = COLORS[index % COLORS.length];
        const chart = new Chart(`Reward of ${name}`, [{ label: "step", color, width: 1, alpha: 0.4 }, { label: "mean", color, width: 2 }, { label: "held-out", color, dots: true }], { height: 112, small: true, range: rewardRange });
        const value = h("b");
        multiples.set(name, { chart, value, element: h("div", {}, h("h3", {}, h("span", {}, h("i", { class: "swatch", vars: { "--swatch": `var(${color})` } }), name), value), chart.element) });
        fill(domains, [...multiples.values()].map((one) => one.element));
      }
      const own = rewards.map((one) => one[name] ?? null);
      const { chart, value } = multiples.get(name);
      const smoothed = smooth(own);
      const now = smoothed.filter((one) => one !== null).at(-1);
      text(value, number(now, 2));
      chart.set([all, spread(own), spread(smoothed), all.map((step) => heldAt.get(step)?.domains?.[name]?.mean_reward ?? null)], `now ${number(now, 2)}`);
    });
  }

  // Rewards by name, where a batch has more than the outcome.
  function drawComponents(steps) {
    const rows = column("reward_components");
    const names = [...new Set(rows.flatMap((one) => Object.keys(one)))].sort().slice(0, COLORS.length);
    if (!names.length) return;
    if (names.join() !== components.names.join()) {
      components.chart?.end();
      components.names = names;
      components.chart = new Chart("Reward components", names.map((label, index) => ({ label, color: COLORS[index], width: 2 })));
      fill(components.place, components.chart.element);
    }
    components.chart.set([steps, ...names.map((name) => smooth(rows.map((one) => one[name] ?? null)))], "mean of the trajectories that have one");
  }

  function drawSteps() {
    if (!state.rows.length) return;
    drawCompared();
    const steps = column("step");
    const last = (name) => column(name).at(-1);
    charts.tokens.set([steps, column("trained_tokens_per_s"), smooth(column("trained_tokens_per_s"))], `now ${number(smooth(column("trained_tokens_per_s")).at(-1))}`);
    charts.staleness.set([steps, column("staleness_max"), column("staleness_mean")], `mean ${number(last("staleness_mean"))}, max ${number(last("staleness_max"))}`);
    charts.entropy.set([steps, column("entropy")], `now ${number(last("entropy"), 3)}`);
    charts.gap.set([steps, column("logprob_gap_p99"), column("logprob_gap_mean"), column("inference_gap_mean")], `mean ${number(last("logprob_gap_mean"), 3)}`);
    charts.merge.set([steps, column("merge_ratio")], `now ${number(last("merge_ratio"), 1)}×`);
    charts.time.set([steps, column("step_s"), column("wait_s"), column("publish_s")], `${seconds(last("step_s"))} train, ${seconds(last("wait_s"))} wait`);
    charts.yield.set([steps, column("yield_j")], `now ${number(last("yield_j"), 2)}`);
    drawReward();
    drawComponents(steps);
    const reward = column("mean_reward");
    tiles.reward.set(number(smooth(reward).at(-1), 3), `last step ${number(reward.at(-1), 2)}`);
    const factors = last("yield_tokens_per_s") ? `${number(last("yield_tokens_per_s"), 0)} tokens/s × ${last("yield_gain").toExponential(1)} gain per rollout` : "tokens/s × gain per rollout";
    tiles.yield.set(number(last("yield_j"), 2), factors);
    tiles.staleness.set(number(last("staleness_mean"), 1), `max ${number(last("staleness_max"), 0)} steps`);
  }

  function drawOverview() {
    const { trainer, scheduler, inference, errors } = state.overview;
    const problems = [...Object.entries(errors).map(([name, error]) => h("p", { class: "note bad" }, `${name}: ${error}`)), ...(scheduler?.problems || []).map((one) => h("p", { class: "note" }, one))];
    fill(notes, problems);
    notes.hidden = !problems.length;
    if (trainer) {
      const of = trainer.max_steps ? ` / ${trainer.max_steps}` : "";
      tiles.step.set(`${trainer.step}${of}`, `${trainer.phase}, weights v${trainer.weight_version}`);
      bar.style.width = trainer.max_steps ? `${Math.min(100, (100 * trainer.step) / trainer.max_steps)}%` : "0%";
      text(sub, [inference?.model, trainer.phase, trainer.evaluating ? "evaluating" : "", scheduler ? `queue ${scheduler.activity}` : ""].filter(Boolean).join(" · "));
      const held = heldOut();
      const newest = held.at(-1);
      if (newest) tiles.held.set(number(newest.mean_reward, 3), newest.high > newest.low ? `step ${newest.step}, 95 %: ${number(newest.low, 2)} to ${number(newest.high, 2)}` : `step ${newest.step}`);
    }
    if (inference) tiles.sampled.set(number(inference.sampled_tokens_per_s, 0), `${inference.running} running, ${inference.queued} queued`);
    if (scheduler) tiles.queue.set(number(scheduler.trained), `trained; ${scheduler.running_groups} run, ${scheduler.tombstoned} dropped`);
    if (state.rows.length || trainer?.evaluations.length) drawReward();
  }

  const close = live(["steps", "overview"], {
    steps(event) {
      if (event.anew) {
        state.fields = event.fields;
        state.rows = [];
      }
      state.rows.push(...event.rows);
      drawSteps();
    },
    overview(event) {
      if (!event.state) return;
      state.overview = event.state;
      drawOverview();
    },
  }, context.denied);

  return () => {
    close();
    for (const chart of [...Object.values(charts), ...(components.chart ? [components.chart] : []), ...[...multiples.values()].map((one) => one.chart), ...Object.values(compared.charts)]) chart.end();
  };
}

