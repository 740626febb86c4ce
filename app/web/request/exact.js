// JSON with whole numbers of any length: JSON.parse rounds a seed of 64 bits. Pure.

const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

/** What JSON.parse gives, but a whole number that JavaScript cannot hold is a text of its digits. */
export function parseExact(json) {
  return JSON.parse(json.replace(TOKEN, (token) => (isLong(token) ? `"${token}"` : token)));
}

/** Whether these digits are a whole number that JavaScript rounds. */
export function isLong(token) {
  return /^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token));
}
