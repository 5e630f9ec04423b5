"""What every engine of the coordination store has to do, as tests that its author runs.

Derive a test class from `CoordinationContract` in a module of your tests, and give it the fixture `connect`: a function each call
of which gives a new client of one store, a new and empty one for each test:

    class TestMyEngine(CoordinationContract):
        @pytest.fixture
        def connect(self, my_server):
            with contextlib.ExitStack() as clients:
                yield lambda: clients.enter_context(contextlib.closing(MyCoordination(my_server.address)))

Set the class's attributes where your engine differs. A test may close a client itself, so closing twice must do no harm.
All waiting ends by a deadline; what waits for leases takes a few of `least_ttl_s`.
"""

from __future__ import annotations

from rallypoint.testing.driving import events_until, same
from rallypoint.testing.lease_contract import LeaseContract
from rallypoint.testing.transaction_contract import TransactionContract
from rallypoint.testing.watch_contract import WatchContract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.testing.driving import Connect

__all__ = ["CoordinationContract", "events_until"]


class CoordinationContract(TransactionContract, WatchContract, LeaseContract):
    """All tests of an engine. Its attributes, with what they are unless an author sets them:

    - ``least_ttl_s = 1.0``: the shortest lease that the engine keeps to
    - ``can_compact = False``: whether the method `compact`, by default 30,000 changes, makes it forget its oldest ones
    """

    def test_all_clients_know_the_store_by_one_name(self, connect: Connect) -> None:
        one, two = connect(), connect()
        assert one.identity(), "a store has an identity"
        same(one.identity(), two.identity())

    def test_a_client_knows_its_own_address(self, connect: Connect) -> None:
        address = connect().local_address()
        assert isinstance(address, str), "an address is text"
        assert address, "an address is not empty"

    def test_a_client_may_be_closed_twice(self, connect: Connect) -> None:
        client = connect()
        client.close()
        client.close()
