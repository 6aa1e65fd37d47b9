// The trace.

/** Hand the trace to Perfetto's page, which asks for no file of a server, and show the zoomed span there. */
function openPerfetto(charts) {
  const text = document.getElementById("trace").textContent;
  const buffer = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  const origin = "https://ui.perfetto.dev";
  const opened = window.open(origin);
  if (!opened) return;
  const asking = setInterval(() => opened.postMessage("PING", origin), 100);
  setTimeout(() => clearInterval(asking), 30000);
  window.addEventListener("message", function answered(event) {
    if (event.origin !== origin || event.source !== opened || event.data !== "PONG") return;
    clearInterval(asking);
    window.removeEventListener("message", answered);
    opened.postMessage({ perfetto: { buffer, title: document.title, fileName: trace } }, origin);
    const zoomed = charts.find((chart) => chart && chart.isZoomed && chart.options.x.label === ALIGNMENTS.time);
    const span = zoomed && zoomed.span;
    if (span) opened.postMessage({ perfetto: { timeStart: span[0], timeEnd: span[1], viewPercentage: 0.9 } }, origin);
  });
}
