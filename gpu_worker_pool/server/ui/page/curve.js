// The last readings of a GPU as a chart: memory as an area, utilization as a line, the thresholds dashed.

import { attribute, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 56;

export class Readings {
  #times = [];
  #memory = [];
  #utilization = [];
  #most = 100;

  /** Take the server's history, and keep the readings that the page has seen since. */
  replace(times, memory, utilization, most) {
    const newer = this.#times.findIndex((time) => time > (times.at(-1) ?? -Infinity));
    const kept = newer < 0 ? [[], [], []] : [this.#times, this.#memory, this.#utilization].map((row) => row.slice(newer));
    this.#most = most;
    this.#times = [...times, ...kept[0]];
    this.#memory = [...memory, ...kept[1]];
    this.#utilization = [...utilization, ...kept[2]];
    this.#trim();
  }

  add(time, memory, utilization) {
    if (time <= (this.#times.at(-1) ?? -Infinity)) return;
    this.#times.push(time);
    this.#memory.push(memory);
    this.#utilization.push(utilization);
    this.#trim();
  }

  get count() {
    return this.#times.length;
  }

  get last() {
    return this.#times.at(-1) ?? null;
  }

  get spanS() {
    return this.count < 2 ? 0 : this.#times.at(-1) - this.#times[0];
  }

  utilizationPath() {
    return this.#line(this.#utilization);
  }

  /** Closed areas above the axis, split where a value is unknown. */
  memoryPath() {
    return this.#pieces(this.#memory)
      .map((piece) => `M${piece[0].x} ${HEIGHT}${piece.map(({ x, y }) => `L${x} ${y}`).join("")}L${piece.at(-1).x} ${HEIGHT}Z`)
      .join("");
  }

  #line(values) {
    return this.#pieces(values)
      .map((piece) => `M${piece.map(({ x, y }) => `${x} ${y}`).join("L")}${piece.length === 1 ? "h1" : ""}`)
      .join("");
  }

  #pieces(values) {
    const first = this.#times[0];
    const scale = WIDTH / (this.spanS || 1);
    const pieces = [];
    let piece = null;
    values.forEach((value, i) => {
      if (typeof value !== "number") {
        piece = null;
        return;
      }
      if (piece === null) pieces.push((piece = []));
      piece.push({ x: ((this.#times[i] - first) * scale).toFixed(1), y: height(value) });
    });
    return pieces;
  }

  #trim() {
    const over = this.#times.length - this.#most;
    if (over > 0) for (const row of [this.#times, this.#memory, this.#utilization]) row.splice(0, over);
  }
}

const height = (percent) => (HEIGHT - (Math.min(Math.max(percent, 0), 100) / 100) * HEIGHT).toFixed(1);

export class Curve {
  #memory = svg("path", { class: "memory-area" });
  #utilization = svg("path", { class: "utilization-line" });
  #memoryMark = svg("path", { class: "memory-mark" });
  #utilizationMark = svg("path", { class: "utilization-mark" });
  #shown = null;

  constructor() {
    this.node = svg(
      "svg",
      { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.#memory,
      this.#memoryMark,
      this.#utilizationMark,
      this.#utilization,
    );
  }

  update(readings, thresholds, label) {
    attribute(this.node, "aria-label", label);
    attribute(this.#memoryMark, "d", `M0 ${height(thresholds.memory_percent)}H${WIDTH}`);
    attribute(this.#utilizationMark, "d", `M0 ${height(thresholds.utilization_percent)}H${WIDTH}`);
    const shown = `${readings.last} ${readings.count}`;
    if (shown === this.#shown) return;
    this.#shown = shown;
    attribute(this.#memory, "d", readings.memoryPath());
    attribute(this.#utilization, "d", readings.utilizationPath());
  }
}
