// Tokens of one turn's sequence, colored. Only the visible lines are elements, so 200,000 tokens scroll.

import { fill, h, text } from "./dom.js";
import { count, number } from "./format.js";
import { get } from "./live.js";
import { coverage, describe, legend, MODES, NO_VALUES, tint } from "./token_colors.js";

const PART = 20000;
const LINE = 22;
const SPARE = 12;
const LINES_SHOWN = 20;

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
    this.scroll = h("div", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Tokens: the keys left and right move from token to token" }, this.lines);
    this.total = h("span", { class: "muted small" });
    this.scale = h("ul", { class: "legend scale" });
    const select = h("select", { "aria-label": "Color of tokens" }, MODES.map(([value, label]) => h("option", { value }, label)));
    select.addEventListener("change", () => {
      this.mode = select.value;
      this.draw(true);
    });
    this.jump = h("button", { type: "button", onclick: () => this.toAnswer() }, "To the answer");
    this.next = h("button", { type: "button", onclick: () => this.toClipped() }, "Next clipped");
    fill(place, h("div", { class: "head" }, h("h2", {}, "Tokens"), this.total, h("span", { class: "grow" }), this.next, this.jump, select), this.scale, this.scroll, this.info);
    this.scroll.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey || !this.ids.length) return;
      event.preventDefault();
      const from = this.at < 0 ? this.starts[Math.max(0, Math.ceil(this.scroll.scrollTop / LINE))] - 1 : this.at;
      this.select(Math.max(0, Math.min(this.ids.length - 1, from + step)));
    });
    this.scroll.addEventListener("scroll", () => this.draw(false), { passive: true });
    this.scroll.addEventListener("mousemove", (event) => {
      if (event.target.dataset?.at === undefined) return;
      this.info.setAttribute("aria-live", "off");
      text(this.info, this.about(Number(event.target.dataset.at)));
    });
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.scroll);
  }

  reset() {
    this.ids = [];
    this.texts = [];
    this.logprobs = [];
    this.versions = [];
    this.turns = [];
    this.values = NO_VALUES();
    this.at = -1;
    this.starts = [0];
    this.columns = 0;
    this.drawn = "";
    this.all = 0;
  }

  async show(id, turn) {
    this.stop.abort();
    const stop = (this.stop = new AbortController());
    const path = `/api/trajectories/${encodeURIComponent(id)}/turns/${turn}`;
    this.reset();
    this.turn = turn;
    this.next.hidden = true;
    fill(this.lines);
    text(this.info, "");
    this.scroll.scrollTop = 0;
    try {
      for (let first = 0; first === 0 || first < this.all; first += PART) {
        const part = await get(`${path}/tokens?first=${first}&count=${PART}`, stop.signal);
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
      return;
    }
    await this.readValues(path, stop.signal);
  }

  // After the tokens, which do not wait for the trainer.
  async readValues(path, signal) {
    const { values } = this;
    try {
      for (let first = 0; first < this.all; first += PART) {
        const part = await get(`${path}/values?first=${first}&count=${PART}`, signal);
        if (signal.aborted) return;
        values.note = part.note;
        Object.assign(values.steps, part.turns);
        for (const [name, column] of Object.entries(values.columns)) for (const one of part[name]) column.push(one);
        if (part.note) break;
      }
    } catch (error) {
      if (signal.aborted) return;
      values.note = error.message;
    }
    values.coverage = coverage(this);
    this.next.hidden = !values.columns.clipped.includes(true);
    this.draw(true);
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
    this.scroll.scrollTop = Math.max(0, (this.lineOf(first) - 3) * LINE);
    this.draw(false);
  }

  // A token for the keyboard: visible, marked and described.
  select(index) {
    this.at = index;
    const line = this.lineOf(index);
    const top = line * LINE;
    if (top < this.scroll.scrollTop || top + LINE > this.scroll.scrollTop + this.scroll.clientHeight) this.scroll.scrollTop = Math.max(0, (line - 3) * LINE);
    this.draw(true);
    this.info.setAttribute("aria-live", "polite");
    text(this.info, this.about(index));
  }

  toClipped() {
    const { clipped } = this.values.columns;
    const after = clipped.indexOf(true, this.at + 1);
    this.select(after < 0 ? clipped.indexOf(true) : after);
  }

  lineOf(index) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.starts[middle] <= index) low = middle;
      else high = middle - 1;
    }
    return low;
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
        const marks = [this.turns[index] < 0 ? "t" : this.turns[index] === this.turn ? "t own" : "t sampled"];
        if (this.mode !== "none" && this.values.columns.clipped[index]) marks.push("clipped");
        if (this.mode !== "none" && this.values.columns.masked[index]) marks.push("masked");
        if (index === this.at) marks.push("at");
        const token = h("span", { class: marks.join(" "), "data-at": index }, this.texts[index]);
        const shade = tint(this, index);
        if (shade) token.style.backgroundColor = `color-mix(in srgb, var(${shade[0]}) ${Math.round(shade[1] * 100)}%, transparent)`;
        row.append(token);
        if (this.gap) row.append(" ");
      }
      lines.push(row);
    }
    fill(this.lines, lines);
    if (anew) legend(this.scale, this);
  }

  about(index) {
    return `Token ${index}: id ${this.ids[index]}, ${this.turns[index] < 0 ? "prompt" : describe(this, index)}`;
  }

  end() {
    this.stop.abort();
    this.watcher.disconnect();
  }
}
