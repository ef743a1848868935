// Numbers, times and names as texts. An unknown value is "unknown", never zero. A number and its unit stay on one line.

export const UNKNOWN = "unknown";
export const NONE = "\u2013";

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

const rounded = (unit) => (value) => (isKnown(value) ? `${Math.round(value)}\u00a0${unit}` : UNKNOWN);

export const [percent, temperature, power] = ["%", "°C", "W"].map(rounded);

export function memory(mb) {
  if (!isKnown(mb)) return UNKNOWN;
  return mb >= 1024 ? `${(mb / 1024).toFixed(mb >= 102_400 ? 0 : 1)}\u00a0GiB` : `${Math.round(mb)}\u00a0MiB`;
}

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

/** Three digits are enough: 1234, 123, 12.3, 1.23. No use at all is a dash. */
export function hours(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value === 0) return NONE;
  if (value < 0.01) return "< 0.01";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

const NEAR_MS = 18 * 3_600_000;
const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { weekday: "short" });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export const dateOf = (ms) => DATE.format(ms);

/** The time of day to the minute; with the day if it is 18 hours away, with the date if it is a week away. */
export function clock(ms, nowMs) {
  if (!isKnown(ms)) return UNKNOWN;
  const away = Math.abs(ms - nowMs);
  const time = MINUTES.format(ms);
  if (!(away > NEAR_MS)) return time;
  return `${away > 6 * 86_400_000 ? DATE.format(ms) : DAY.format(ms)} ${time}`;
}

/** A start that is expected: now, 14:05, ~14:05 where it is predicted, unknown. */
export function start(at, basis, nowMs) {
  if (!isKnown(at)) return UNKNOWN;
  if (at <= nowMs) return "now";
  return `${basis === "declared" ? "" : "~"}${clock(at, nowMs)}`;
}

/** A name that a user has chosen: it may be of any direction of writing, and must not turn the sentence around it. */
export const name = (text) => ({ name: text });

/** A sentence as its parts: texts, and names apart from them. */
export const say = (texts, ...values) => texts.flatMap((text, i) => (i < values.length ? [text, values[i]] : [text])).flat().filter((part) => part !== "");

/** The same as one text, where there can be no elements: invisible signs keep the names apart. */
export const plain = (parts) => [parts].flat().map((part) => (part?.name === undefined ? part : `\u2068${part.name}\u2069`)).join("");

export const parseTime = (iso) => (typeof iso === "string" ? Date.parse(iso) : NaN);

/** The name of a holder or waiter: the owner, else the worker, else the lease. */
export const holderName = (lease) => lease.owner ?? lease.worker_id ?? lease.lease_id ?? lease.id ?? "an unnamed holder";

/** What it runs: the command, else the name it was given. */
export const runs = (lease) => lease.label || lease.labels?.command || lease.labels?.name || "";

/** The labels without the one that says what it runs. */
export function otherLabels(labels) {
  const said = labels.command ? "command" : "name";
  return Object.entries(labels)
    .filter(([key]) => key !== said)
    .map(([key, value]) => `${key}: ${value}`)
    .join(" · ");
}

/** A100 80GB for Simulated NVIDIA A100-SXM4-80GB. */
export function shortModel(name) {
  if (name === null) return "model unknown";
  const bare = name.replace(/^((Simulated|NVIDIA|AMD|Tesla|GeForce|Instinct|Radeon) +)+(?=.)/, "");
  return bare.replace(/-(SXM\d?|PCIE?|NVL)\b/gi, "").replaceAll("-", " ");
}

export const gpuName = (gpu) => (isKnown(gpu.gpu_id) ? `GPU ${gpu.gpu_id}` : "a GPU without an index");

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : (names[0] ?? "no GPU"));

const MOST_NAMED = 4;

/** GPU 0 and 1; of a fleet, GPU 0 and 1 of gpu-01; 8 GPUs of gpu-02. */
export function gpuNames(gpus, isFleet) {
  const byNode = new Map();
  for (const gpu of gpus) byNode.set(gpu.node, [...(byNode.get(gpu.node) ?? []), gpu]);
  const parts = [...byNode].map(([node, its]) => {
    const known = its.every((gpu) => isKnown(gpu.gpu_id));
    const names = its.length > MOST_NAMED || !known ? (its.length === 1 ? "a GPU" : plural(its.length, "GPU")) : `GPU ${listed(its.map((gpu) => gpu.gpu_id))}`;
    return isFleet && node ? `${names} of ${node}` : names;
  });
  return parts.join("; ") || "no GPU";
}

/** What a request wants: 2 GPUs, A100, 23 GiB of one, only GPU 6. */
export function wants({ gpus, memory_mb, model, among, nodes, time_limit_s, priority, preemptible }) {
  const count = nodes > 1 ? `${gpus} × ${plural(nodes, "box", "boxes")}` : memory_mb !== null ? memory(memory_mb) : plural(gpus, "GPU");
  const only = among === null ? "" : `only GPU ${among.join(", ")}`;
  const limit = time_limit_s === null ? "" : duration(time_limit_s);
  const rank = priority ? `priority\u00a0${priority}` : "";
  return [count, model ?? "", only, limit, rank, preemptible ? "preemptible" : ""].filter(Boolean).join(", ");
}

export const END_REASONS = {
  released: "released",
  expired: "expired without a heartbeat",
  cancelled: "left the queue",
  holder_died: "its process died",
  revoked: "ended by an operator",
  time_limit: "its time limit is over",
  preempted: "preempted for another request",
  idle: "its GPUs computed nothing",
};

export const WARNINGS = { time_limit: "time limit", preempted: "preempted", idle: "idle" };

/** A word of a shell, quoted if it must be. */
const quoted = (word) => (/^[\w.,:/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** The command that asks for GPUs; unset wishes are left out. */
export function runCommand({ gpus, model, memoryGb, time, command }) {
  const words = ["gpu-pool", "run"];
  if (memoryGb) words.push("--memory", `${memoryGb}GB`);
  else if (gpus > 1) words.push("--gpus", String(gpus));
  if (model) words.push("--model", quoted(model));
  if (time) words.push("--time", quoted(time));
  return `${words.join(" ")} -- ${command || "python train.py"}`;
}
