// What the page has to show.

document.documentElement.classList.add("js");
const { curves: told, use, trace } = JSON.parse(document.getElementById("data").textContent);
const ALIGNMENTS = { time: "virtual time", steps: "steps", bytes: "sent by a worker" };
