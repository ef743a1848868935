// Numbers, times and names as texts. An unknown value is "unknown", never zero. A number and its unit stay on one line.

import { nowMs } from "./now.js";

export const UNKNOWN = "unknown";

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

export const percent = (value) => (isKnown(value) ? `${Math.round(value)}\u00a0%` : UNKNOWN);

export function memory(mb) {
  if (!isKnown(mb)) return UNKNOWN;
  return mb >= 1024 ? `${(mb / 1024).toFixed(1)}\u00a0GiB` : `${Math.round(mb)}\u00a0MiB`;
}

export const temperature = (value) => (isKnown(value) ? `${Math.round(value)}\u00a0°C` : UNKNOWN);

export const power = (value) => (isKnown(value) ? `${Math.round(value)}\u00a0W` : UNKNOWN);

/** 42 s, 5 min, 2 h 5 min, 3 d 4 h: two units at most. */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}\u00a0s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes}\u00a0min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours}\u00a0h ${minutes % 60}\u00a0min` : `${hours}\u00a0h`;
  return hours % 24 ? `${Math.floor(hours / 24)}\u00a0d ${hours % 24}\u00a0h` : `${Math.floor(hours / 24)}\u00a0d`;
}

export function hours(value) {
  if (!isKnown(value)) return UNKNOWN;
  return value > 0 && value < 0.01 ? "< 0.01" : value.toFixed(2);
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { weekday: "short", day: "numeric", month: "short" });

/** The time of day, with the date if it is not today. */
export function clock(ms, now = nowMs()) {
  if (!isKnown(ms)) return UNKNOWN;
  const time = CLOCK.format(ms);
  return isKnown(now) && DAY.format(ms) === DAY.format(now) ? time : `${DAY.format(ms)}, ${time}`;
}

const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const WEEKDAY = new Intl.DateTimeFormat("en-GB", { weekday: "short" });

/** The time of day to the minute, or the day if it is not today. */
export function shortClock(ms, now = nowMs()) {
  if (!isKnown(ms)) return UNKNOWN;
  return DAY.format(ms) === DAY.format(now) ? MINUTES.format(ms) : WEEKDAY.format(ms);
}

export const parseTime = (iso) => (typeof iso === "string" ? Date.parse(iso) : NaN);

/** The name of a holder or waiter: the owner, else the worker, else the lease. */
export function holderName(lease) {
  return lease.owner ?? lease.worker_id ?? lease.lease_id ?? lease.id ?? "an unnamed holder";
}

/** What it runs: the command, else the name it was given. */
export function details(lease) {
  return lease.label || lease.labels?.command || lease.labels?.name || "";
}

/** The labels without the one that is among the details. */
export function otherLabels(labels) {
  const said = labels.command ? "command" : "name";
  return Object.entries(labels)
    .filter(([key]) => key !== said)
    .map(([key, value]) => `${key}: ${value}`)
    .join(" · ");
}

export function gpuName(gpu) {
  return gpu.gpu_id === null || gpu.gpu_id === undefined ? `GPU ${gpu.uuid}` : `GPU ${gpu.gpu_id}`;
}

/** Whether the GPUs are those of several boxes, so that a GPU's name needs its box. */
export const naming = { isFleet: false };

export const gpuOfBox = (gpu) => (naming.isFleet && gpu.node ? `${gpuName(gpu)} of ${gpu.node}` : gpuName(gpu));

const MOST_NAMED = 4;

export function gpuNames(gpus) {
  if (gpus.length === 0) return "no GPU";
  if (!naming.isFleet) return listed(gpus.map(gpuName));
  const byNode = Map.groupBy(gpus, (gpu) => gpu.node ?? "an unknown box");
  return [...byNode].map(([node, its]) => `${its.length > MOST_NAMED ? plural(its.length, "GPU") : listed(its.map(gpuName))} of ${node}`).join("; ");
}

const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]);

export const stateWord = (state) => state.replaceAll("_", " ");

export const END_REASONS = {
  released: "released",
  expired: "expired without a heartbeat",
  cancelled: "left the queue",
  holder_died: "its process died",
  revoked: "revoked by the operator",
  time_limit: "its time limit is over",
  preempted: "preempted for another request",
  idle: "its GPUs computed nothing",
};

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
