// How likely a token was, as a tint: the less likely, the darker on paper, the brighter in the dark. Steps and not a
// slide, so that two of them can be told apart, and one hue, so that no eye needs to tell hues. The tints themselves
// are in tokens.css, with a contrast of 4.5 to 1 to the ink.

import { element } from "../elements.js";

const STEPS = [0.5, 0.2, 0.05, 0.01, 0.001, 0]; // a tint is for probabilities from here up to the one before

/** The class of the tint for a probability. */
export function tint(probability) {
  return `tint-${STEPS.findIndex((least) => probability >= least)}`;
}

/** The legend, in one line. */
export function legend() {
  const steps = STEPS.map((least, index) => {
    const step = element("span", index < STEPS.length - 1 ? `${Number((least * 100).toPrecision(1))} %` : "less");
    step.className = `tint-${index}`;
    return step;
  });
  const line = element("p", element("span", "at least"), ...steps);
  line.className = "legend";
  return line;
}
