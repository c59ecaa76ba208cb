// Tokens of one turn's sequence, colored. Only the visible lines are elements, so 200,000 tokens scroll.

import { fill, h, text } from "./dom.js";
import { count, number } from "./format.js";
import { get } from "./live.js";

const PART = 20000;
const LINE = 22;
const SPARE = 12;
const LINES_SHOWN = 20;
const MODES = [
  ["logprob", "log-prob"],
  ["advantage", "advantage"],
  ["version", "weight version"],
  ["none", "no color"],
];

// Marks for whitespace, so that every token can be seen.
function shown(token) {
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·").replace(/[\u0000-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, "□") || "∅";
}

export class TokenView {
  constructor(place, advantageOf) {
    this.place = place;
    this.advantageOf = advantageOf;
    this.mode = "logprob";
    this.stop = new AbortController();
    this.reset();
    this.info = h("p", { class: "small muted token-info", "aria-live": "off" }, "");
    this.lines = h("div", { class: "lines" });
    this.scroll = h("div", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Tokens" }, this.lines);
    this.total = h("span", { class: "muted small" });
    this.scale = h("span", { class: "scale small muted" });
    const select = h("select", { "aria-label": "Color of tokens" }, MODES.map(([value, label]) => h("option", { value }, label)));
    select.addEventListener("change", () => {
      this.mode = select.value;
      this.draw(true);
    });
    this.jump = h("button", { type: "button", onclick: () => this.toAnswer() }, "To the answer");
    fill(place, h("div", { class: "head" }, h("h2", {}, "Tokens"), this.total, h("span", { class: "grow" }), this.jump, select), this.scale, this.scroll, this.info);
    this.scroll.addEventListener("scroll", () => this.draw(false), { passive: true });
    this.scroll.addEventListener("mousemove", (event) => this.point(event.target));
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.scroll);
  }

  reset() {
    this.ids = [];
    this.texts = [];
    this.logprobs = [];
    this.versions = [];
    this.turns = [];
    this.starts = [0];
    this.columns = 0;
    this.drawn = "";
    this.all = 0;
  }

  async show(id, turn) {
    this.stop.abort();
    const stop = (this.stop = new AbortController());
    this.reset();
    this.turn = turn;
    fill(this.lines);
    text(this.info, "");
    this.scroll.scrollTop = 0;
    try {
      for (let first = 0; first === 0 || first < this.all; first += PART) {
        const part = await get(`/api/trajectories/${encodeURIComponent(id)}/turns/${turn}/tokens?first=${first}&count=${PART}`, stop.signal);
        if (stop.signal.aborted) return;
        this.all = part.total;
        for (let index = 0; index < part.ids.length; index += 1) {
          this.ids.push(part.ids[index]);
          this.texts.push(part.texts ? shown(part.texts[index]) : String(part.ids[index]));
          this.logprobs.push(part.logprobs[index]);
          this.versions.push(part.versions[index]);
          this.turns.push(part.turns[index]);
        }
        this.gap = part.texts ? 0 : 1;
        text(this.total, `${count(this.all, "token")}${this.ids.length < this.all ? `, ${number(this.ids.length)} read` : ""}`);
        this.layout();
      }
      this.toAnswer();
    } catch (error) {
      if (!stop.signal.aborted) fill(this.lines, h("p", { class: "note" }, error.message));
    }
  }

  // Break into lines by characters: every line has one height.
  layout() {
    const probe = h("span", { class: "probe" }, "0".repeat(100));
    this.lines.append(probe);
    const width = probe.getBoundingClientRect().width / 100 || 8;
    probe.remove();
    this.columns = Math.max(10, Math.floor((this.scroll.clientWidth - 24) / width));
    const starts = [0];
    let used = 0;
    for (let index = 0; index < this.texts.length; index += 1) {
      const length = Math.min(this.texts[index].length + (this.gap || 0), this.columns);
      const broken = index > 0 && this.texts[index - 1].endsWith("⏎");
      if (used && (used + length > this.columns || broken)) {
        starts.push(index);
        used = 0;
      }
      used += length;
    }
    this.starts = starts;
    this.lines.style.height = `${starts.length * LINE}px`;
    this.scroll.style.height = `${Math.min(LINES_SHOWN, starts.length) * LINE + 12}px`;
    const versions = this.versions.filter((one) => one >= 0);
    let low = Infinity;
    let high = -Infinity;
    for (const one of versions) {
      low = Math.min(low, one);
      high = Math.max(high, one);
    }
    this.bounds = [low, high];
    this.draw(true);
  }

  toAnswer() {
    const first = this.turns.indexOf(this.turn);
    if (first < 0) return;
    let line = 0;
    while (line + 1 < this.starts.length && this.starts[line + 1] <= first) line += 1;
    this.scroll.scrollTop = Math.max(0, (line - 3) * LINE);
    this.draw(false);
  }

  tint(index) {
    if (this.turns[index] < 0 || this.mode === "none") return null;
    if (this.mode === "logprob") {
      // 0: certain; -5 and below: unlikely.
      const share = Math.min(1, -this.logprobs[index] / 5);
      return ["--bad", 0.04 + 0.6 * share];
    }
    if (this.mode === "version") {
      const [low, high] = this.bounds;
      return ["--c0", high > low ? 0.1 + (0.5 * (this.versions[index] - low)) / (high - low) : 0.25];
    }
    const advantage = this.advantageOf(this.turns[index]);
    if (advantage === null || !advantage) return null;
    return [advantage > 0 ? "--good" : "--bad", Math.min(0.6, 0.12 + 0.5 * Math.abs(advantage))];
  }

  draw(anew) {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / LINE) - SPARE);
    const last = Math.min(this.starts.length, Math.ceil((this.scroll.scrollTop + this.scroll.clientHeight) / LINE) + SPARE);
    const key = `${first}-${last}`;
    if (!anew && key === this.drawn) return;
    this.drawn = key;
    const lines = [];
    for (let line = first; line < last; line += 1) {
      const row = h("div", { class: "line" });
      row.style.top = `${line * LINE}px`;
      const end = line + 1 < this.starts.length ? this.starts[line + 1] : this.texts.length;
      for (let index = this.starts[line]; index < end; index += 1) {
        const token = h("span", { class: this.turns[index] < 0 ? "t" : this.turns[index] === this.turn ? "t own" : "t sampled", "data-at": index }, this.texts[index]);
        const tint = this.tint(index);
        if (tint) token.style.backgroundColor = `color-mix(in srgb, var(${tint[0]}) ${Math.round(tint[1] * 100)}%, transparent)`;
        row.append(token);
        if (this.gap) row.append(" ");
      }
      lines.push(row);
    }
    fill(this.lines, lines);
    text(this.scale, { logprob: "Sampled tokens: the redder, the less likely (log-prob 0 to −5). Prompt tokens have none.", advantage: "Green: above the group's mean, red: below; default weights.", version: this.bounds && this.bounds[1] > this.bounds[0] ? `The bluer, the newer: weights v${this.bounds[0]} to v${this.bounds[1]}.` : "All sampled tokens are of one weight version.", none: "" }[this.mode]);
  }

  point(target) {
    const at = target.dataset?.at;
    if (at === undefined) return;
    const index = Number(at);
    const own = this.turns[index] < 0 ? "prompt" : `turn ${this.turns[index]}, log-prob ${number(this.logprobs[index], 3)} (p ${number(Math.exp(this.logprobs[index]), 3)}), weights v${this.versions[index]}, advantage ${number(this.advantageOf(this.turns[index]), 3)}`;
    text(this.info, `Token ${index}: id ${this.ids[index]}, ${own}`);
  }

  end() {
    this.stop.abort();
    this.watcher.disconnect();
  }
}
