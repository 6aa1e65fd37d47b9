// Assemble the page.

const charts = [];
const section = document.getElementById("curves");
if (payload) {
  charts.push(showCurves(section));
  const used = element("section", { id: "rates" });
  section.after(used);
  charts.push(showUse(used));
}
if (use.length && document.getElementById("use")) showLinks(document.getElementById("use"));
const perfetto = document.getElementById("perfetto");
if (perfetto && document.getElementById("trace")) {
  perfetto.hidden = false;
  perfetto.addEventListener("click", () => openPerfetto(charts));
}
const cues = () => {
  for (const cue of document.querySelectorAll(".cue")) {
    const table = cue.nextElementSibling;
    cue.classList.toggle("idle", table.scrollWidth <= table.clientWidth + 1);
  }
};
addEventListener("resize", cues);
cues();
window.netgym = { charts };
