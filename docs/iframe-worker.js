/* Search in pages that were opened as files: browsers start no workers there, so the script that
   searches runs in a hidden frame. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.receive = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.srcdoc = `<script>postMessage = data => frameElement.receive(data)</script>
        <script src="${url}"></script>`;
      this.ready = new Promise(resolve => (this.frame.onload = resolve));
      document.body.append(this.frame);
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
