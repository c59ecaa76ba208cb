// Curves over optimizer steps. All charts of a page share one cursor.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { css, h, text } from "./dom.js";
import { number } from "./format.js";

const cursor = uPlot.sync("steps");

function axis(extra) {
  return { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), size: 4 }, font: "11px system-ui, sans-serif", ...extra };
}

function stroke(color, alpha = 1) {
  const value = css(color);
  return alpha === 1 ? value : `${value}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

// Vertical bars from low to high at the points of a series.
function intervals(index, bounds) {
  return (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.strokeStyle = plot.series[index].points.stroke();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const [step, low, high] of bounds()) {
      const x = plot.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, plot.valToPos(low, "y", true));
      ctx.lineTo(x, plot.valToPos(high, "y", true));
      ctx.stroke();
    }
    ctx.restore();
  };
}

// series: [{label, color, width, alpha, dots, legend}]
export class Chart {
  constructor(title, series, { height = 190, range, small = false, unit = "", bounds } = {}) {
    this.series = series;
    this.options = { height, range, small, unit, bounds };
    this.summary = h("span");
    this.place = h("div", { class: "plot", role: "img", "aria-label": title });
    this.title = title;
    this.element = small ? this.place : h("section", { class: "panel chart" }, h("header", {}, h("h2", {}, title), this.summary), this.place);
    this.data = [[], ...series.map(() => [])];
    this.plot = null;
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.place);
    this.redraw = () => this.make();
    document.addEventListener("theme", this.redraw);
  }

  make() {
    const width = Math.floor(this.place.clientWidth);
    if (!width) return;
    if (this.plot) this.plot.destroy();
    const { height, range, small, bounds } = this.options;
    const dots = this.series.findIndex((one) => one.dots) + 1;
    this.plot = new uPlot(
      {
        width,
        height,
        cursor: { sync: { key: cursor.key }, points: { size: 6 }, drag: { x: !small, y: false }, y: false },
        legend: { show: !small, live: true },
        scales: { x: { time: false }, y: { range: range || ((_, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high === low ? low + 1 : high, 0.1, true))) } },
        axes: small
          ? [axis({ size: 20, space: 60 }), axis({ size: 30, space: 34, values: (_, all) => all.map((one) => number(one, 1)) })]
          : [axis({ size: 26 }), axis({ size: 48, values: (_, all) => all.map((one) => number(one)) })],
        series: [
          { label: "step", value: (_, value) => (value === null ? "" : String(value)) },
          ...this.series.map((one) => ({
            label: one.label,
            stroke: () => stroke(one.color, one.alpha),
            width: one.dots ? 0 : one.width || 1.75,
            paths: one.dots ? () => null : undefined,
            spanGaps: true,
            points: one.dots ? { show: true, size: small ? 6 : 8, width: 1.5, fill: css("--panel"), stroke: () => stroke(one.color) } : { show: false },
            value: (_, value) => (value === null || value === undefined ? "" : number(value, 3)),
          })),
        ],
        hooks: bounds ? { draw: [intervals(dots, bounds)] } : {},
      },
      this.data,
      this.place,
    );
    // Faint raw curves need no line of their own in the legend.
    this.series.forEach((one, index) => {
      const row = this.place.querySelectorAll(".u-legend .u-series")[index + 1];
      if (row && one.legend === false) row.hidden = true;
    });
    for (const row of this.place.querySelectorAll(".u-legend th")) row.removeAttribute("tabindex");
  }

  resize() {
    const width = Math.floor(this.place.clientWidth);
    if (!this.plot) this.make();
    else if (width && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
  }

  set(data, summary) {
    this.data = data;
    text(this.summary, summary);
    this.place.setAttribute("aria-label", `${this.title}: ${summary || "no steps yet"}`);
    if (this.plot) this.plot.setData(data);
    else this.make();
  }

  end() {
    document.removeEventListener("theme", this.redraw);
    this.watcher.disconnect();
    if (this.plot) this.plot.destroy();
  }
}

