// Copies text to the clipboard. Only pages from https or this machine may use the Clipboard API; others use a selection and
// document.execCommand("copy").

import { element } from "../elements.js";

/** The message if the browser does not allow it. */
export const REFUSED = "This browser does not let the page copy. Over https, or from this machine, it would.";

/** Copies `text`; returns whether that worked. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // refused or missing
  }
}

function copySelected(text) {
  const { activeElement: before } = document;
  const area = element("textarea");
  area.value = text;
  area.readOnly = true; // opens no keyboard on a phone
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus({ preventScroll: true });
  return done;
}
