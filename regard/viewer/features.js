"use strict";
// A page of features: the examples that each is strongest at, and what the model answers when a
// feature is turned up or down.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");

function element(kind, parent, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

function drawText(parent, example) {
  const line = element("p", parent, undefined, "example");
  example.tokens.forEach((token, place) => {
    const span = element("span", line, token, place === example.peak ? "peak" : "");
    const strength = example.values[place];
    span.style.background = `rgba(228, 80, 107, ${0.75 * strength})`;
    span.title = strength.toFixed(2);
  });
}

async function drawImage(parent, example) {
  const canvas = element("canvas", parent);
  canvas.title = example.label;
  const bytes = Uint8Array.from(atob(example.picture), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
}

function drawSteering(parent, steering) {
  const box = element("div", parent, undefined, "steering");
  const label = element("label", box, `Turned up or down, for “${steering.input}”: `);
  const slider = element("input", label);
  const told = element("span", label);
  const answer = element("pre", box);
  slider.type = "range";
  slider.min = 0;
  slider.max = steering.strengths.length - 1;
  slider.value = steering.strengths.indexOf(0);
  const show = () => {
    told.textContent = ` ${steering.strengths[slider.value]} times its strongest`;
    answer.textContent = steering.answers[slider.value];
  };
  slider.addEventListener("input", show);
  show();
}

element("h1", page, data.title);
for (const line of data.about) element("p", page, line, "soft");
for (const feature of data.features) {
  const section = element("section", page, undefined, "feature");
  section.id = `feature-${feature.number}`;
  element("h2", section, `Feature ${feature.number}`);
  element("p", section, feature.about, "soft");
  const pictures = feature.examples.some((example) => example.picture)
    ? element("div", section, undefined, "pictures") : section;
  for (const example of feature.examples) {
    if (example.picture) drawImage(pictures, example);
    else drawText(section, example);
  }
  if (feature.steering) drawSteering(section, feature.steering);
}
