// Presets: named settings that come with the page or that the user saved. Pure.
//
// A preset says how tokens are sampled: the sampling settings that it does not list go back to the model's defaults.
// Other settings that it does not list (length, stop texts, grammars) stay as they are.

const SAMPLING = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "typical_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
];
const OF_THE_TEXT = ["seed", "n", "source", "suffix"]; // never part of a preset
const NAME_LENGTH = 40;
const VALUE_LENGTH = 30;

/** { name, words, settings }; `settings` maps request fields to what one would type, as everywhere on the page. */
export const BUILT_IN = [
  { name: "Precise", words: "Keeps to the likely words.", settings: { temperature: "0.3", top_p: "0.9" } },
  { name: "Balanced", words: "", settings: {} },
  {
    name: "Adventurous",
    words: "Takes unlikely words too, but none with less than a twentieth of the likeliest one's probability.",
    settings: { temperature: "1.2", top_p: "1", min_p: "0.05" },
  },
];

/** What the user must change about a name; the message is for the user. */
export class PresetError extends Error {}

/** The settings to save, of those on the page. */
export function settingsOf(typed) {
  return Object.fromEntries(Object.entries(typed).filter(([name, text]) => text !== "" && !OF_THE_TEXT.includes(name)));
}

/** The settings on the page once the preset is applied to them. */
export function applied({ settings }, typed) {
  return { ...typed, ...Object.fromEntries(SAMPLING.map((name) => [name, ""])), ...settings };
}

/** Whether applying the preset would change nothing. */
export function isApplied(preset, typed) {
  return Object.entries(applied(preset, typed)).every(([name, text]) => (typed[name] ?? "") === text);
}

/** What the preset sets, in words. */
export function description({ words = "", settings }) {
  const entries = Object.entries(settings).map(([name, text]) => `${name.replaceAll("_", " ")} ${shortened(text)}`);
  const isWhole = SAMPLING.every((name) => name in settings);
  const rest = isWhole ? "" : entries.length ? "otherwise the model's defaults" : "every sampling setting at the model's default";
  const sentence = [entries.join(", "), rest].filter(Boolean).join("; ");
  return [words, `${sentence[0].toUpperCase()}${sentence.slice(1)}.`].filter(Boolean).join(" ");
}

/** The name without space around it; throws PresetError unless it is a new one among `presets`. */
export function newName(text, presets) {
  const name = text.trim().replace(/\s+/g, " ");
  if (!name) throw new PresetError("A preset needs a name.");
  if (name.length > NAME_LENGTH) throw new PresetError(`A name has at most ${NAME_LENGTH} characters.`);
  const isTaken = [...BUILT_IN, ...presets].some((one) => one.name.toLowerCase() === name.toLowerCase());
  if (isTaken) throw new PresetError(`There is a preset called ${name} already.`);
  return name;
}

/** The saved presets in stored JSON; what is none is left out. */
export function parsed(json) {
  try {
    return JSON.parse(json).filter(isPreset);
  } catch {
    return [];
  }
}

function isPreset(value) {
  const isTexts = (one) => one?.constructor === Object && Object.values(one).every((text) => typeof text === "string");
  return typeof value?.name === "string" && value.name !== "" && isTexts(value.settings);
}

function shortened(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > VALUE_LENGTH ? `${line.slice(0, VALUE_LENGTH)} \u2026` : line;
}
