"""A web server of a test, in a thread."""

import asyncio
import threading
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def web_server(*routes):
    """Serve the routes; yields the server's URL."""
    service, loop = web.Application(), asyncio.new_event_loop()
    service.add_routes(routes)
    runner = web.AppRunner(service, shutdown_timeout=0.1)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def stop():
        await runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
