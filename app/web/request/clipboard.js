// Puts text on the clipboard. Browsers allow it to pages that came over TLS or from this machine; for the others there
// is the old way, a selection and the command that Ctrl+C is.

import { element } from "../elements.js";

/** What to say where it is not allowed. */
export const REFUSED = "This browser does not let the page copy. Over https, or from this machine, it would.";

/** Whether `text` is there now. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // refused, or no such thing
  }
}

function copySelected(text) {
  const { activeElement: before } = document;
  const area = element("textarea");
  area.value = text;
  area.readOnly = true; // a phone shows no keyboard for it
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus({ preventScroll: true });
  return done;
}
