// Preferences of this browser, shared by all tabs: theme, font and width of the text, spell checking. Style sheets read
// them from data-* attributes of the root element, which has none for defaults.

import { classed, element, put } from "./elements.js";

const PLACE = "inkstream.preferences";
/** Choices of each preference, its default first. */
const PREFERENCES = {
  theme: ["system", "light", "dark"],
  font: ["book", "sans", "mono"],
  lines: ["standard", "narrow", "wide"],
  spelling: ["off", "on"],
};

/** The stored preferences, { name: choice }; ignores invalid choices. */
export function valid(stored) {
  const isChoice = ([name, choice]) => PREFERENCES[name]?.slice(1).includes(choice);
  return Object.fromEntries(Object.entries(stored ?? {}).filter(isChoice));
}

/** Applies the stored preferences, and again when another tab changes them. Returns them. */
export function applyPreferences() {
  addEventListener("storage", ({ key }) => key === PLACE && apply(load()));
  return apply(load());
}

/** Creates the controls in the popover `root`, and calls `onchange(choices)` at each change. */
export function showPreferences(root, onchange) {
  const chosen = applyPreferences();
  onchange(chosen);
  for (const [name, choices] of Object.entries(PREFERENCES)) {
    const group = classed("fieldset", "choices", element("legend", name));
    for (const choice of choices) {
      const radio = element("input");
      Object.assign(radio, { type: "radio", name: `preference-${name}`, value: choice });
      radio.checked = choice === (chosen[name] ?? choices[0]);
      put(group, put(element("label"), radio, element("span", choice)));
    }
    root.append(group);
  }
  root.addEventListener("change", ({ target }) => {
    chosen[target.name.replace("preference-", "")] = target.value;
    onchange(apply(valid(chosen)));
    save(valid(chosen));
  });
}

function apply(choices) {
  const { dataset } = document.documentElement;
  for (const name of Object.keys(PREFERENCES)) {
    if (choices[name]) dataset[name] = choices[name];
    else delete dataset[name];
  }
  return choices;
}

function load() {
  try {
    return valid(JSON.parse(localStorage.getItem(PLACE)));
  } catch {
    return {}; // no storage, or invalid JSON
  }
}

function save(choices) {
  try {
    localStorage.setItem(PLACE, JSON.stringify(choices));
  } catch {
    // Storage is disabled or full: the choice lasts as long as the page.
  }
}
