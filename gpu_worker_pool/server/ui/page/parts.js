// Small parts that all views use.

import { mayManage } from "./facts.js";
import { html } from "./vendor/preact.js";
import { holderName, name, plain } from "./words.js";

/** A sentence: its texts, and each name in an element of its own direction of writing. */
export const Text = ({ parts }) => [parts].flat().map((part) => (part?.name === undefined ? part : html`<bdi>${part.name}</bdi>`));

const COLOURS = 8;
const colours = new Map();

/** The colour of an owner, the same in all views: the first owners that are seen get one each, all others the last. */
export function colourOf(owner) {
  if (!colours.has(owner)) colours.set(owner, Math.min(colours.size, COLOURS));
  return colours.get(owner);
}

/** A holder or waiter: a stripe in its owner's colour, and the name on one line. */
export const Owner = ({ lease, isMine }) => html`<span class="owner" data-mine=${isMine || null} title=${plain(name(holderName(lease)))}>
  <i class=${`stripe owner-${colourOf(lease.owner)}`} aria-hidden="true"></i><bdi>${holderName(lease)}</bdi>${isMine && html`<span class="hidden">, yours</span>`}
</span>`;

/** Ends a lease, where the user may. */
export const EndButton = ({ lease, page: { me, isConnected, open } }) =>
  isConnected && lease.state === "active" && mayManage(me, lease) && html`<button type="button" aria-label=${plain(["End the lease of ", name(holderName(lease))])}
    onClick=${() => open({ kind: "end", leases: [lease] })}>End…</button>`;

/** A text on one line, in full in its title. */
export const Clamped = ({ text, className = "" }) => html`<bdi class=${`clamped ${className}`} title=${text || null}>${text}</bdi>`;

/** A number from 0 to 100 % as a bar; hatched if it is unknown. */
export function Meter({ label, value, words, threshold }) {
  const width = value === null ? 0 : Math.min(Math.max(value, 0), 100);
  const text = `${words}${threshold === undefined ? "" : `; granted below ${threshold} %`}`;
  return html`<span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${width.toFixed(0)} aria-valuetext=${text}
    data-unknown=${value === null || null} data-over=${(value !== null && value >= threshold) || null} title=${`${label}: ${text}`}>
    <i style=${{ width: `${width.toFixed(1)}%` }}></i>
  </span>`;
}

const MOST_READINGS = 100;
const QUARTER_S = 900;

/** The last readings of each GPU, by its key: those of the server's history, and those that the page has seen since. */
export class Readings {
  #byGpu = new Map();

  /**
   * Take the history of the GPUs of the server's own box, of which the last reading was about `measuredAt`. Its times are local and
   * without a zone: they differ from UTC by quarters of an hour.
   */
  replace(history, measuredAt, keyOf) {
    const seconds = (text) => Date.parse(`${text}Z`) / 1000;
    const zone = Math.round((measuredAt - seconds(history.timestamp)) / QUARTER_S) * QUARTER_S;
    for (const gpu of history.gpus ?? []) {
      const older = gpu.readings.map((each) => ({ at: seconds(each.timestamp) + zone, memory: each.memory_usage_percent, utilization: each.utilization_percent }));
      const last = older.at(-1)?.at ?? -Infinity;
      const newer = this.of(keyOf(gpu.uuid)).filter((reading) => reading.at > last);
      this.#byGpu.set(keyOf(gpu.uuid), [...older, ...newer].slice(-MOST_READINGS));
    }
  }

  add(at, gpus) {
    for (const gpu of gpus) {
      const kept = this.of(gpu.key);
      if (at <= (kept.at(-1)?.at ?? -Infinity)) continue;
      this.#byGpu.set(gpu.key, [...kept, { at, memory: gpu.memory_percent, utilization: gpu.utilization_percent }].slice(-MOST_READINGS));
    }
  }

  of(key) {
    return this.#byGpu.get(key) ?? [];
  }
}

/** The lines of a curve, broken where a value is unknown, as the path of an SVG of this size. */
export function curvePath(readings, which, width, height) {
  const first = readings[0]?.at ?? 0;
  const scale = width / ((readings.at(-1)?.at ?? 0) - first || 1);
  let isOpen = false;
  return readings
    .map((reading) => {
      const value = reading[which];
      if (typeof value !== "number") {
        isOpen = false;
        return "";
      }
      const point = `${((reading.at - first) * scale).toFixed(1)} ${(height - (Math.min(Math.max(value, 0), 100) / 100) * height).toFixed(1)}`;
      const sign = isOpen ? "L" : "M";
      isOpen = true;
      return `${sign}${point}`;
    })
    .join("");
}

export const Curve = ({ readings, width, height, label, kinds }) => html`<svg class="curve" viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img"
  aria-label=${label}>
  ${kinds.map((kind) => html`<path class=${kind} d=${curvePath(readings, kind, width, height)} />`)}
</svg>`;
