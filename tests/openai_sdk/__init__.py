"""The SDK's own tests, run with our session and as our runs; `docs/sdk_tests.md` tells of them."""
