// The banner that says that brokers, or klog ui itself, do not answer; it ends by itself.

import { get } from "./api.js";
import { time } from "./dom.js";

const PAUSE = 500;
const banner = document.getElementById("outage");

// Calls `recovered`, and the document's listeners of "recovered", when an outage of the brokers is over.
export function watchOutages(recovered) {
  let isOut = false;
  let serverSince = null;

  async function look() {
    try {
      const outage = await get("outage");
      if (serverSince !== null) location.reload(); // it may be another server, with another token
      if (outage !== null) {
        banner.textContent = `The broker at ${outage.servers} has not answered since ${time(outage.since)} UTC (${outage.error}). ` +
          "The page goes on when it is back.";
      } else if (isOut) {
        banner.textContent = "";
        document.dispatchEvent(new Event("recovered"));
        recovered();
      }
      isOut = outage !== null;
    } catch {
      serverSince ??= Date.now();
      banner.textContent = `klog ui at ${location.host} has not answered since ${time(serverSince)} UTC. Is it running?`;
    }
    setTimeout(look, PAUSE);
  }
  look();
}
