// Keyboard shortcuts: maps keys to named actions. A focused field keeps its own keys (undo in a number field, Enter in
// a text).

const TYPED_INTO = "input:not([type=range], [type=radio]), textarea:not(#document)";

/** `actions`: { generate, regenerate, stop, undo, redo, inspect, branches, documents, help }; `running()`: whether there is something
    to stop. */
export function listen(actions, running) {
  document.addEventListener("keydown", (event) => {
    const name = event.isComposing ? null : nameOf(event, running());
    if (!name) return;
    event.preventDefault();
    // A repeated keydown counts once, except for undo and redo, which step.
    if (!event.repeat || name === "undo" || name === "redo") actions[name]();
  });
}

function nameOf({ key, target, ctrlKey, metaKey, altKey, shiftKey }, isRunning) {
  if (target.closest?.("dialog")) return null; // which covers what the actions change
  if (key === "Escape") return isRunning ? "stop" : null;
  if (key === "?" && !target.closest?.("input, textarea, select")) return "help";
  if (!(ctrlKey || metaKey) || altKey) return null; // Ctrl with Alt is how some keyboards write letters
  if (key === "/") return "help";
  if (key.toLowerCase() === "k" && !shiftKey) return "documents";
  if (key === "Enter") return shiftKey ? "regenerate" : "generate";
  if (target.closest?.(TYPED_INTO)) return null;
  const letter = key.toLowerCase();
  if (letter === "i" && !shiftKey) return "inspect";
  if (letter === "b" && !shiftKey) return "branches";
  if (letter === "z") return shiftKey ? "redo" : "undo";
  return letter === "y" ? "redo" : null;
}
