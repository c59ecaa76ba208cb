// Colors of tokens, their legend, and what is known of one token. A value that is not stored is missing, never 0.

import { fill, h } from "./dom.js";
import { number } from "./format.js";

export const MODES = [
  ["logprob", "log-prob"],
  ["ratio", "importance ratio"],
  ["entropy", "entropy"],
  ["advantage", "advantage"],
  ["version", "weight version"],
  ["none", "no color"],
];
const MOST_NATS = 3;

// Columns of the trainer's values beside those of the tokens; null where none is stored. `coverage` is null until they are read.
export const NO_VALUES = () => ({
  coverage: null,
  note: "",
  steps: {},
  columns: { logprobs: [], log_ratios: [], entropies: [], advantages: [], clipped: [], masked: [] },
});

function advantageOf(view, index) {
  return view.values.columns.advantages[index] ?? view.advantageOf(view.turns[index]);
}

// Variable and share of a token's color; null for none.
export function tint(view, index) {
  if (view.turns[index] < 0 || view.mode === "none") return null;
  const { log_ratios, entropies } = view.values.columns;
  switch (view.mode) {
    case "logprob":
      // 0: certain; -5 and below: unlikely.
      return ["--bad", 0.04 + 0.6 * Math.min(1, -view.logprobs[index] / 5)];
    case "ratio": {
      const log = log_ratios[index];
      if (log === null || log === undefined) return null;
      return [log > 0 ? "--c1" : "--c0", 0.04 + 0.5 * Math.min(1, Math.abs(log) / Math.LN2)];
    }
    case "entropy": {
      const nats = entropies[index];
      return nats === null || nats === undefined ? null : ["--c3", 0.04 + 0.5 * Math.min(1, nats / MOST_NATS)];
    }
    case "version": {
      const [low, high] = view.bounds;
      return ["--c0", high > low ? 0.1 + (0.5 * (view.versions[index] - low)) / (high - low) : 0.25];
    }
    default: {
      const advantage = advantageOf(view, index);
      if (advantage === null || !advantage) return null;
      return [advantage > 0 ? "--good" : "--bad", Math.min(0.6, 0.12 + 0.5 * Math.abs(advantage))];
    }
  }
}

function swatch(variable, label) {
  const box = h("i", { class: "swatch", "aria-hidden": "true" });
  box.style.background = `var(${variable})`;
  return h("li", {}, box, label);
}

function line(label) {
  return h("li", {}, label);
}

// Sampled tokens of the sequence, those with stored values, whether the chosen turn has any, and whether any token is marked.
export function coverage(view) {
  const { log_ratios: stored, clipped, masked } = view.values.columns;
  let sampled = 0;
  let known = 0;
  let own = false;
  view.turns.forEach((turn, index) => {
    if (turn < 0) return;
    sampled += 1;
    if ((stored[index] ?? null) === null) return;
    known += 1;
    own ||= turn === view.turn;
  });
  return [sampled, known, own, clipped.includes(true) || masked.includes(true)];
}

function storedNote(view) {
  if (!view.values.coverage) return line("Reading the trainer's values …");
  if (view.values.note) return line(view.values.note);
  const [sampled, known, own] = view.values.coverage;
  if (!known) return line("The trainer stores no values of these turns.");
  return line(`${own ? "" : "Not stored for this turn. "}Values of ${number(known)} of ${number(sampled)} sampled tokens are stored.`);
}

const marks = (view) => view.values.coverage?.[3] && [h("li", {}, h("span", { class: "mono clipped" }, "clipped"), " beyond a bound of the loss"), h("li", {}, h("span", { class: "mono masked" }, "masked"), " by the correction")];

export function legend(place, view) {
  const [low, high] = view.bounds ?? [0, 0];
  const rows = {
    logprob: () => [swatch("--bad", "The redder, the less likely: log-prob 0 to −5. Prompt tokens have none."), marks(view)],
    ratio: () => [swatch("--c1", "ratio above 1, full at 2"), swatch("--c0", "below 1, full at ½"), marks(view), storedNote(view)],
    entropy: () => [swatch("--c3", `The more violet, the higher: entropy 0 to ${MOST_NATS} nats`), marks(view), storedNote(view)],
    advantage: () => [swatch("--good", "above 0"), swatch("--bad", "below 0"), line(view.values.coverage?.[1] ? "The trainer's, where it is stored; otherwise an estimate with default weights." : "An estimate with default weights."), marks(view)],
    version: () => [swatch("--c0", high > low ? `The bluer, the newer: weights v${low} to v${high}.` : "All sampled tokens are of one weight version."), marks(view)],
    none: () => [],
  };
  fill(place, rows[view.mode]());
}

// One sampled token in words.
export function describe(view, index) {
  const turn = view.turns[index];
  const { values } = view;
  const known = [`turn ${turn}`, `log-prob ${number(view.logprobs[index], 3)} (p ${number(Math.exp(view.logprobs[index]), 3)})`, `weights v${view.versions[index]}`];
  const log = values.columns.log_ratios[index] ?? null;
  if (log === null) {
    known.push(`advantage ${number(view.advantageOf(turn), 3)} (estimate)`, values.coverage ? "ratio and entropy not stored for this turn" : "ratio and entropy not read yet");
    return known.join(", ");
  }
  const at = (name) => number(values.columns[name][index], 3);
  const [step, version] = values.steps[turn];
  known.push(`advantage ${at("advantages")}`, `step ${step} with weights v${version}: log-prob ${at("logprobs")}, ratio ${log < 20 ? number(Math.exp(log), 3) : `e^${number(log)}`}${values.columns.clipped[index] ? " (clipped)" : ""}${values.columns.masked[index] ? " (masked)" : ""}, entropy ${at("entropies")} nats`);
  return known.join(", ");
}
