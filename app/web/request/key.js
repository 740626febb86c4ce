// The API key: kept for this tab only (in memory if there is no storage), sent as Authorization, never part of a URL.

const PLACE = "inkstream.key";
let key = stored();

/** What a request needs beside its own headers. */
export function authorization() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Keeps what the user typed; false for what can be no key. */
export function useKey(typed) {
  const text = typed.trim();
  if (!/^[\x21-\x7e]+$/.test(text)) return false;
  key = text;
  try {
    sessionStorage.setItem(PLACE, key);
  } catch {
    // Switched off: the key lasts as long as the page.
  }
  return true;
}

function stored() {
  try {
    return sessionStorage.getItem(PLACE) ?? "";
  } catch {
    return "";
  }
}
