// Layout of a graph: layers, with each node after all nodes that it reads from, and neighbours close.

/** The layer of each node: the length of the longest path to it. Ignores edges that close a cycle. */
function layersOf(nodes, edges) {
  const layer = new Map(nodes.map((name) => [name, 0]));
  for (let round = 0; round < nodes.length; round++) {
    let changed = false;
    for (const [from, to] of edges) {
      if (layer.get(to) > layer.get(from) || layer.get(from) + 1 >= nodes.length) continue;
      layer.set(to, layer.get(from) + 1);
      changed = true;
    }
    if (!changed) break;
  }
  return layer;
}

/** Positions {name: {x, y}} and the total size. `gapAlong` may be a function of the number of layers. `down` stacks the layers, for narrow screens. */
export function layout(nodes, edges, { width, height, gapAlong, gapAcross, down }) {
  const layer = layersOf(nodes, edges);
  const layers = [];
  for (const name of nodes) (layers[layer.get(name)] ??= []).push(name);
  const filled = layers.filter(Boolean);
  const order = new Map();
  filled.forEach((names, depth) => {
    const middle = (name) => {
      const before = edges.filter(([, to]) => to === name).map(([from]) => order.get(from)).filter((at) => at != null);
      return before.length ? before.reduce((a, b) => a + b) / before.length : 0;
    };
    if (depth) names.sort((a, b) => middle(a) - middle(b));
    names.forEach((name, at) => order.set(name, at - (names.length - 1) / 2));
  });
  const widest = Math.max(...filled.map((names) => names.length));
  const [along, across] = down ? [height, width] : [width, height];
  const gap = typeof gapAlong === "function" ? gapAlong(filled.length) : gapAlong;
  const places = {};
  filled.forEach((names, depth) => names.forEach((name) => {
    const a = depth * (along + gap);
    const b = (order.get(name) + (widest - 1) / 2) * (across + gapAcross);
    places[name] = down ? { x: b, y: a } : { x: a, y: b };
  }));
  const [long, wide] = [filled.length * along + (filled.length - 1) * gap, widest * across + (widest - 1) * gapAcross];
  return { places, ...(down ? { width: wide, height: long } : { width: long, height: wide }) };
}
