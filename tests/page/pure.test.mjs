// The pure parts of the page, without a browser: `node --test`. tests/page/test_frame_of_page.py runs it where Node is there.

import assert from "node:assert/strict";
import { test } from "node:test";

const page = new URL("../../gpu_worker_pool/server/ui/page/", import.meta.url);
const load = (name) => import(new URL(name, page));
const words = await load("words.js");
const { readView } = await load("pool.js");
const facts = await load("facts.js");
const { barsOf, dragged, inLanes, marks, together } = await load("timeline.js");
const { readHash, writeHash } = await load("app.js");
const { sentence, spansOf, usageRows } = await load("usage.js");
const { curvePath } = await load("parts.js");

const NOW = Date.parse("2026-11-17T23:08:00Z");
const at = (minutes) => new Date(NOW + minutes * 60_000).toISOString();
const gpu = (id, state, more = {}) => ({ node: "box1", gpu_id: id, uuid: `GPU-${id}`, name: "NVIDIA A100-SXM4-80GB", state, leases: [], ...more });
const view = (pool, more = {}) => readView({ now: at(0), pool: { node: "box1", gpus: [], ...pool }, ...more });

test("times are to the minute, with the day only where it is 18 hours away", () => {
  process.env.TZ = "UTC";
  assert.equal(words.clock(NOW + 2 * 3_600_000, NOW), "01:08"); // across midnight
  assert.equal(words.clock(NOW + 30 * 3_600_000, NOW), "Thu 05:08");
  assert.equal(words.clock(NOW - 40 * 86_400_000, NOW), "8 Oct 23:08");
  assert.equal(words.clock(NaN, NOW), "unknown");
  assert.deepEqual([words.start(NOW - 1, "predicted", NOW), words.start(NOW + 60_000, "declared", NOW), words.start(NOW + 60_000, "predicted", NOW)], ["now", "23:09", "~23:09"]);
  assert.deepEqual([59, 60, 3720, 100_000].map(words.duration), ["59\u00a0s", "1\u00a0min", "1\u00a0h 2\u00a0min", "1\u00a0d 3\u00a0h"]);
});

test("what is unknown is never zero", () => {
  for (const show of [words.percent, words.memory, words.temperature, words.power, words.duration, words.hours]) assert.equal(show(null), "unknown");
  const { pool } = view({ gpus: [{ state: "surprising", utilization_percent: "x" }, 7, null], queue: "?", leases: { a: 1 } });
  assert.deepEqual([pool.gpus.length, pool.gpus[0].state, pool.gpus[0].utilization_percent, pool.queueLength], [1, "unknown", null, 0]);
  assert.throws(() => readView({ pool: {} }), /cannot be read/);
});

test("names are short, and commands are quoted", () => {
  assert.deepEqual(["Simulated NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "Tesla T4", null].map(words.shortModel), ["A100 80GB", "RTX 4090", "T4", "model unknown"]);
  assert.equal(words.gpuNames([{ gpu_id: null, uuid: "GPU-b5", node: "gpu-03" }], true), "a GPU of gpu-03"); // no UUID
  assert.equal(words.gpuNames([0, 1, 2].map((id) => ({ gpu_id: id, node: "a" })), false), "GPU 0, 1 and 2");
  assert.equal(words.runCommand({ gpus: 2, model: "A 100", time: "2h", command: "" }), "gpu-pool run --gpus 2 --model 'A 100' --time 2h -- python train.py");
});

test("the kinds add up to all GPUs, and the chips count what the text finds", () => {
  const states = ["free", "leased", "shared", "held", "draining", "busy", "outside", "out_of_service", "unhealthy", "unknown"];
  const all = view({ gpus: states.map((state, i) => gpu(i, state, state === "leased" ? { leases: ["l"] } : {})), leases: [{ id: "l", state: "active", owner: "ada" }] });
  assert.deepEqual([...facts.countKinds(all.pool.gpus)], [["free", 1], ["used", 2], ["kept", 1], ["blocked", 3], ["broken", 1], ["off", 1], ["unknown", 1]]);
  const found = facts.filtered(all, { find: "ADA", show: "all" }, "ada");
  assert.deepEqual([found.gpus.length, found.counts.get("all"), found.counts.get("free"), found.counts.get("mine")], [1, 1, undefined, 1]);
});

test("the answer names the soonest start of a request that is made now", () => {
  const starts = (minutes) => [{ gpus: 1, at: minutes === null ? null : at(minutes), basis: "predicted" }];
  const answer = (pool, models) => {
    const told = view(pool, { forecast: { models } });
    return facts.answerOf(told, facts.modelsOf(told), NOW);
  };
  const held = [gpu(0, "leased"), gpu(1, "leased", { name: "NVIDIA L4" })];
  assert.equal(answer({ gpus: held }, [{ model: held[0].name, starts: starts(34) }, { model: "NVIDIA L4", starts: starts(90) }]), "No GPU is free. Ask now for 1: about 23:42 (A100 80GB).");
  assert.equal(answer({ gpus: held.slice(0, 1), queue_length: 3 }, [{ model: held[0].name, starts: starts(null) }]), "No GPU is free, and it is not known when one will be. 3 requests wait.");
  assert.equal(answer({ gpus: [gpu(0, "free"), held[1]] }, []), "1 GPU is free: 1 A100 80GB.");
  assert.equal(answer({ gpus: held, trouble: "the disk is full" }, []), "No GPU can be granted now.");
});

test("the queue tells once what most wait for, and of each row what differs", () => {
  const waiter = (i, owner, reason) => ({ id: `w${i}`, owner, position: i, reason: `Position ${i} of 4, waiting for 1 GPU: ${reason}`, wishes: { gpus: 1 } });
  const shared = "2 leased by ada; 1 taken out of service: bad fan";
  const queue = [waiter(1, "erin", shared), waiter(2, "erin", shared), waiter(3, "judy", `its owner has 2 of at most 2 GPUs; ${shared}`), waiter(4, "ken", "1 in use outside the pool; 2 not among the GPUs asked for: 6")];
  const { shared: told, rows } = facts.queueOf(view({ queue }).pool);
  assert.equal(told, shared);
  assert.deepEqual(rows.map((row) => [row.lease.owner, row.leases.length, row.why]), [["erin", 2, ""], ["judy", 1, "its owner has 2 of at most 2 GPUs"], ["ken", 1, "1 in use outside the pool"]]);
});

test("a sentence keeps names apart from its words", () => {
  const event = { kind: "granted", owner: "مستخدم", gpus: [{ gpu_id: 0, node: "a" }] };
  assert.deepEqual(sentence(event, false), [{ name: "مستخدم" }, " has ", { name: "GPU 0" }]);
  assert.equal(words.plain(sentence(event, false)), "\u2068مستخدم\u2069 has \u2068GPU 0\u2069");
});

test("the address says what is shown, and nothing else of it counts", () => {
  const url = { at: "usage", find: "a&b=c", show: "free", gpu: "box:GPU-1", as: "leases", span: "week" };
  assert.deepEqual(readHash(writeHash(url)), url);
  assert.equal(writeHash(readHash("#")), "#now");
  assert.equal(writeHash(readHash("#evil?span=__proto__&constructor=1&show=free")), "#now?show=free");
});

test("bars of the timeline: past, held until declared and predicted ends, booked, kept", () => {
  const leases = [{ id: "l", state: "active", owner: "ada", granted_at: at(-60), ends_at: at(30) }, { id: "p", state: "active", owner: "bob", granted_at: at(-30) }];
  const bookings = [{ id: "b", owner: "heidi", gpus: [{ uuid: "GPU-0" }], starts_at: at(100), ends_at: at(160) }, { id: "d", owner: null, gpus: [{ uuid: "GPU-0" }], starts_at: at(200) }];
  const told = view({ gpus: [gpu(0, "shared", { leases: ["l", "p"] })], leases, bookings }, { ends: [{ lease_id: "p", at: at(45) }] });
  const spans = [{ lease_id: "old", owner: "eve", since: at(-120), until: at(-70), end_reason: "released" }, { lease_id: "l", owner: "ada", since: at(-60), until: null }];
  const bars = barsOf(told.pool.gpus[0], spans, told, NOW, { from: NOW - 6 * 3_600_000, to: NOW + 6 * 3_600_000 });
  assert.deepEqual(bars.map((bar) => [bar.kind, bar.key, bar.basis, bar.lane, bar.lanes]), [
    ["past", "old", undefined, 0, 1], ["held", "l", "declared", 0, 2], ["held", "p", "predicted", 1, 2], ["booked", "b", undefined, 0, 1], ["drain", "d", undefined, 0, 1],
  ]);
  assert.deepEqual(inLanes([{ from: 0, to: 5 }, { from: 5, to: 9 }]).map((bar) => bar.lanes), [1, 1]);
  assert.equal(marks(NOW, NOW + 12 * 3_600_000).length, 6);
});

test("starts that lie near each other have one flag, and no flag lies within the words of the one before", () => {
  const groups = together([6.1, 0, 5.9, 12.2, 11.9], (place) => place, 6);
  assert.deepEqual(groups, [[0, 5.9], [6.1, 11.9], [12.2]]);
});

test("what is dragged over is at least a step of the future", () => {
  const step = 15 * 60_000;
  const span = dragged(NOW + 61 * 60_000, NOW + 20 * 60_000, NOW, step);
  assert.deepEqual([(span.from - NOW) / 60_000, (span.to - NOW) / 60_000], [7, 67]);
  const short = dragged(NOW - 50_000, NOW - 10_000, NOW, step);
  assert.deepEqual([short.from >= NOW, short.to - short.from], [true, step]);
});

test("usage is by day and week, without rows of nothing", () => {
  const spans = spansOf(NOW);
  assert.deepEqual([spans.length, spans[1].since <= spans[0].since, spans[2].until], [5, true, spans[1].since]);
  const answer = (hours) => ({ owners: Object.entries(hours).map(([owner, gpu_hours]) => ({ owner, gpu_hours, shared_gpu_hours: 0, leases: 0 })), total: { gpu_hours: 3, shared_gpu_hours: 0 } });
  const { rows } = usageRows([answer({ ada: 1, nobody: 0 }), answer({ ada: 1, bob: 2 }), null]);
  assert.deepEqual(rows.map((row) => [row.owner, row.hours]), [["bob", [0, 2, null]], ["ada", [1, 1, null]]]);
});

test("a curve is broken where a reading is unknown", () => {
  const readings = [{ at: 0, utilization: 0 }, { at: 1, utilization: null }, { at: 2, utilization: 100 }];
  assert.equal(curvePath(readings, "utilization", 10, 10), "M0.0 10.0M10.0 0.0");
});
