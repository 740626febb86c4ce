// Layout of the tree strip, as in a git graph: a column for each depth, a lane for each branch. Pure: maps runs to
// positions in a grid.
//
//   lane -1          o---o        older siblings are above their parent's lane,
//   lane  0  o---o---o---o---o    the current path is straight,
//   lane  1      \---o            newer siblings are below, so that edges never cross

/**
 * `runs`: [{ id, parent, next, here, ... }], parents before their children. Returns
 * { places, edges, columns, lanes: [first, last] }, where `places` maps an id to
 * { id, column, lane, parent, children, next }: children from the top down, `next` the child on the same lane (on the
 * current path, else the one that redo goes to, else the middle one).
 */
export function lay(runs) {
  const places = new Map();
  for (const run of runs) {
    const parent = places.get(run.parent) ?? null;
    const column = parent ? parent.column + 1 : 0;
    places.set(run.id, { id: run.id, column, lane: 0, parent: parent?.id ?? null, children: [], next: run.next });
    parent?.children.push(run.id);
  }
  const here = new Set(runs.filter((run) => run.here).map((run) => run.id));
  const outlines = new Map();
  const offsets = new Map(); // id -> lanes between a child and its parent
  for (const place of [...places.values()].reverse()) {
    const { children, next } = place;
    const middle = children[Math.floor((children.length - 1) / 2)];
    place.next = children.find((id) => here.has(id)) ?? children.find((id) => id === next) ?? middle ?? null;
    outlines.set(place.id, surround(place, outlines, offsets));
  }
  const edges = [];
  for (const place of places.values()) {
    if (place.parent === null) continue;
    place.lane = places.get(place.parent).lane + offsets.get(place.id);
    edges.push({ from: place.parent, to: place.id, here: here.has(place.id) });
  }
  const all = [...places.values()];
  const lanes = all.map((place) => place.lane);
  const columns = 1 + Math.max(-1, ...all.map((place) => place.column));
  return { places, edges, columns, lanes: [Math.min(0, ...lanes), Math.max(0, ...lanes)] };
}

/** The ids in depth-first order. */
export function inOrder(places) {
  const ids = [];
  const open = [...places.values()].filter((place) => place.parent === null).map((place) => place.id).reverse();
  while (open.length) {
    const place = places.get(open.pop());
    ids.push(place.id);
    open.push(...[...place.children].reverse());
  }
  return ids;
}

/** The id that an arrow key leads to from `id`, or null if there is none. */
export function neighbour(places, id, key) {
  const place = places.get(id);
  if (key === "ArrowLeft") return place.parent;
  if (key === "ArrowRight") return place.next;
  if (key === "Home") return end(places, id, "parent");
  if (key === "End") return end(places, id, "next");
  const way = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!way) return null;
  const column = [...places.values()].filter((other) => other.column === place.column);
  const beyond = column.filter((other) => way * (other.lane - place.lane) > 0);
  return beyond.sort((a, b) => way * (a.lane - b.lane))[0]?.id ?? null;
}

// The outline of a subtree: its first and last lane in each column, relative to its root. The next run keeps the lane;
// its siblings are pushed away from it, nearest first, until nothing overlaps.
function surround(place, outlines, offsets) {
  const outline = outlines.get(place.next) ?? new Map();
  const middle = place.children.indexOf(place.next);
  if (place.next !== null) offsets.set(place.next, 0);
  const push = (id, way) => {
    const other = outlines.get(id);
    const distance = Math.max(...[...other].map(([column, span]) => gap(outline.get(column), span, way)));
    offsets.set(id, way * distance);
    for (const [column, [first, last]] of other) widen(outline, column, first + way * distance, last + way * distance);
  };
  for (let i = middle - 1; i >= 0; i -= 1) push(place.children[i], -1);
  for (let i = middle + 1; i < place.children.length; i += 1) push(place.children[i], 1);
  return widen(outline, place.column, 0, 0);
}

// How far a span has to move to clear what is in its column. An empty column counts as one lane, since the line to the
// next run crosses it.
function gap(taken, [first, last], way) {
  const [top, bottom] = taken ?? [0, 0];
  return way > 0 ? bottom + 1 - first : last + 1 - top;
}

function widen(outline, column, first, last) {
  const [top, bottom] = outline.get(column) ?? [first, last];
  return outline.set(column, [Math.min(top, first), Math.max(bottom, last)]);
}

function end(places, id, side) {
  while (places.get(id)[side] !== null) id = places.get(id)[side];
  return id;
}
