// What the page has to show.

document.documentElement.classList.add("js");
const { curves: told, use, trace } = JSON.parse(document.getElementById("data").textContent);
const ALIGNMENTS = { time: told ? told.clock : "virtual time", steps: "steps", bytes: "sent by a worker" };
