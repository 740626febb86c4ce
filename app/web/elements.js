// Helpers that create DOM elements. Text is never parsed as HTML.

/** A new element with these children: elements or text. */
export function element(name, ...children) {
  return put(document.createElement(name), ...children);
}

/** Appends the children, and returns the parent. */
export function put(parent, ...children) {
  parent.append(...children);
  return parent;
}

/** A new element with this class. */
export function classed(name, names, ...children) {
  const made = element(name, ...children);
  made.className = names;
  return made;
}
