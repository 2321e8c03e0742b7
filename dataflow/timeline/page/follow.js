"use strict"
// Loads the page anew when the server has a newer one; the page itself keeps what is shown of it.
const events = new EventSource("events")
events.onmessage = (event) => {
  if (event.data !== document.documentElement.dataset.version) {
    events.close()
    location.reload()
  }
}
