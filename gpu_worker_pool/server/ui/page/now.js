// The server's time, because the page shows the server's times. The clock of the user's machine may differ.

let serverMs = NaN;
let receivedAt = 0;

/** Set the time that the server has just sent. */
export function setNow(ms) {
  serverMs = ms;
  receivedAt = performance.now();
}

export const nowMs = () => serverMs + performance.now() - receivedAt;

/** How long ago the server sent its time. */
export const serverTimeAgeS = () => (performance.now() - receivedAt) / 1000;
