// The terms of a lease as texts: until when it may last, when it will start, and what is planned for a GPU.

import { clock, duration } from "./words.js";

const WARNINGS = { time_limit: "time limit", preempted: "preempted", idle: "idle" };

export const warningWord = (reason) => WARNINGS[reason] ?? reason;

/** `ends 16:20:00`, or `ends in 40 s: time limit` after a warning; `preemptible`; `idle 45 min`. */
export function termsOf(lease, clocks) {
  const terms = [];
  if (lease.warning !== null) terms.push(`ends in ${duration((lease.warning.ends_at - clocks.nowMs) / 1000)}: ${warningWord(lease.warning.reason)}`);
  else if (Number.isFinite(lease.ends_at)) terms.push(`ends ${clock(lease.ends_at, clocks.nowMs)}`);
  else if (lease.time_limit_s !== null) terms.push(`for ${duration(lease.time_limit_s)}`);
  if (lease.preemptible) terms.push("preemptible");
  if (lease.idle_s !== null) terms.push(`idle ${duration(lease.idle_s + clocks.viewAgeS)}`);
  return terms.join(", ");
}

/** When a waiter will probably start, and what that rests on; empty if it is not known. */
export function startOf(lease, clocks) {
  if (!Number.isFinite(lease.expected_start_at)) return "";
  if (lease.expected_start_at <= clocks.nowMs) return "Starts any moment now";
  const at = clock(lease.expected_start_at, clocks.nowMs);
  if (lease.expected_start_basis !== "declared") return `Starts about ${at}, judging by earlier jobs`;
  const holder = (lease.expected_after ?? "").split(" (")[0];
  return `Starts probably at ${at}` + (holder === "" ? "" : `, if ${holder}'s job ends when it said`);
}

export const isDrain = (booking) => booking.owner === null && !Number.isFinite(booking.ends_at);

/** What is planned for a GPU: the reservation of the first waiter, bookings, a drain. */
export function plansOf(gpu, pool, clocks) {
  const isMeant = (plan) => plan.gpus.includes(gpu.uuid);
  const at = (ms) => clock(ms, clocks.nowMs);
  const plans = pool.bookings.filter(isMeant).map((booking) => {
    const why = booking.reason === "" ? "" : `: ${booking.reason}`;
    if (isDrain(booking)) return `out of service from ${at(booking.starts_at)} on${why}`;
    const from = booking.starts_at > clocks.nowMs ? `from ${at(booking.starts_at)} ` : "";
    return `booked for ${booking.owner ?? "nobody"} ${from}until ${at(booking.ends_at)}${why}`;
  });
  const { reservation } = pool;
  if (reservation !== null && isMeant(reservation)) {
    plans.unshift(`reserved for ${reservation.holder}, ${reservation.basis === "predicted" ? "about" : "probably at"} ${at(reservation.starts_at)}`);
  }
  return plans;
}
