// Where each tile of the compact grid is, without the document. Only the lines that are seen are ever drawn.

export const TILE_HEIGHT = 36;
export const GAP = 4;
export const HEAD_HEIGHT = 22;
export const BOX_GAP = 12;
// On a laptop two boxes of eight GPUs stand abreast; in a large box an index has three or four digits.
const LEAST_TILE = 70;
const LEAST_WIDE_TILE = 86;
// A box with up to so many GPUs is one block, and several blocks stand abreast; a larger one has the whole width.
const MOST_IN_BLOCK = 16;
const TILES_ABREAST = 8;

/**
 * The lines of the grid. Each has `top`, `height` and its `parts`: a box, the range of its GPUs, and whether its name
 * stands above them.
 */
export function layOut(boxes, width, hasHeads) {
  const most = boxes.reduce((size, box) => Math.max(size, box.gpus.length), 1);
  const isWide = boxes.length === 1 || most > MOST_IN_BLOCK;
  const columns = Math.max(1, Math.floor((width + GAP) / ((isWide ? LEAST_WIDE_TILE : LEAST_TILE) + GAP)));
  const perRow = isWide ? columns : Math.min(columns, most, TILES_ABREAST);
  const blockWidth = perRow * (LEAST_TILE + GAP) - GAP;
  const abreast = isWide ? 1 : Math.max(1, Math.floor((width + BOX_GAP) / (blockWidth + BOX_GAP)));
  const lines = [];
  let top = 0;
  const add = (parts, isEnd) => {
    const rows = Math.max(...parts.map((part) => Math.ceil((part.to - part.from) / perRow)));
    const hasHead = parts.some((part) => part.hasHead);
    const height = (hasHead ? HEAD_HEIGHT : 0) + rows * (TILE_HEIGHT + GAP);
    const next = top + height + (isEnd ? BOX_GAP - GAP : 0);
    lines.push({ key: parts.map((part) => `${part.box.key} ${part.from}`).join("\n"), top, height, parts });
    top = next;
  };
  const whole = (box) => ({ box, from: 0, to: box.gpus.length, hasHead: hasHeads });
  if (isWide) {
    for (const box of boxes) {
      for (let from = 0; from < Math.max(box.gpus.length, 1); from += perRow) {
        const to = Math.min(from + perRow, box.gpus.length);
        add([{ box, from, to, hasHead: hasHeads && from === 0 }], to === box.gpus.length);
      }
    }
  } else {
    for (let i = 0; i < boxes.length; i += abreast) add(boxes.slice(i, i + abreast).map(whole), true);
  }
  return { lines, perRow, abreast, height: top };
}

/** The lines between two heights, by bisection: there may be thousands. */
export function linesBetween(lines, from, to) {
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle].top + lines[middle].height < from) low = middle + 1;
    else high = middle;
  }
  let end = low;
  while (end < lines.length && lines[end].top <= to) end += 1;
  return [low, end];
}

/** The GPU that an arrow key leads to, as `{line, part, at}`; the same place at an edge. */
export function neighbour({ lines, perRow }, { line, part, at }, key) {
  const { from, to } = lines[line].parts[part];
  const [row, column] = [Math.floor((at - from) / perRow), (at - from) % perRow];
  if (key === "ArrowRight" || key === "ArrowLeft") {
    const step = key === "ArrowRight" ? 1 : -1;
    if (at + step >= from && at + step < to) return { line, part, at: at + step };
    return edge(lines, line, part, step) ?? { line, part, at };
  }
  const below = row + (key === "ArrowDown" ? 1 : -1);
  const rows = Math.ceil((to - from) / perRow);
  if (below >= 0 && below < rows) return { line, part, at: Math.min(from + below * perRow + column, to - 1) };
  const next = line + (key === "ArrowDown" ? 1 : -1);
  if (next < 0 || next >= lines.length) return { line, part, at };
  const index = Math.min(part, lines[next].parts.length - 1);
  const target = lines[next].parts[index];
  if (target.to === target.from) return { line, part, at };
  const last = Math.ceil((target.to - target.from) / perRow) - 1;
  return { line: next, part: index, at: Math.min(target.from + (key === "ArrowDown" ? 0 : last) * perRow + column, target.to - 1) };
}

/** The first GPU after, or the last before, a part. */
function edge(lines, line, part, step) {
  let [l, p] = [line, part + step];
  for (;;) {
    if (lines[l].parts[p] === undefined) {
      l += step;
      if (lines[l] === undefined) return null;
      p = step > 0 ? 0 : lines[l].parts.length - 1;
    }
    const { from, to } = lines[l].parts[p];
    if (to > from) return { line: l, part: p, at: step > 0 ? from : to - 1 };
    p += step;
  }
}
