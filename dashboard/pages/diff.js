// Differences between two sequences of tokens.

const CELLS = 6e6;

/** [[kind, tokens]] from `a` to `b`: kind is "same", "gone" (only in a) or "new" (only in b). A long middle counts as different. */
export function difference(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const parts = [];
  const add = (kind, token) => {
    const last = parts[parts.length - 1];
    if (last && last[0] === kind) last[1].push(token);
    else parts.push([kind, [token]]);
  };
  for (const token of a.slice(0, start)) add("same", token);
  middle(a.slice(start, a.length - end), b.slice(start, b.length - end), add);
  for (const token of a.slice(a.length - end)) add("same", token);
  return parts;
}

/** The longest common subsequence, from the table of its lengths. */
function middle(a, b, add) {
  if (!a.length || !b.length || a.length * b.length > CELLS) {
    for (const token of a) add("gone", token);
    for (const token of b) add("new", token);
    return;
  }
  const wide = b.length + 1;
  const length = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      length[i * wide + j] = a[i] === b[j] ? length[(i + 1) * wide + j + 1] + 1 : Math.max(length[(i + 1) * wide + j], length[i * wide + j + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      add("same", a[i]);
      [i, j] = [i + 1, j + 1];
    } else if (length[(i + 1) * wide + j] >= length[i * wide + j + 1]) add("gone", a[i++]);
    else add("new", b[j++]);
  }
  while (i < a.length) add("gone", a[i++]);
  while (j < b.length) add("new", b[j++]);
}
