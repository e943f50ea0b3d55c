"""The admin client: `admin.py` is the public class, each other module has the calls of one family.

`calls.py` has what they share: the lock, the deadline, attempts for each item, and the routing of requests.
"""
