"""Tokens for Amazon MSK's IAM access control, by AWS's published signer.

A token is a request to the action kafka-cluster:Connect that is signed with AWS credentials (Signature Version 4). MSK
takes it by OAUTHBEARER, on the same port as from Java's AWS_MSK_IAM.
"""

from __future__ import annotations

import os
import re

from spark_klog.client.security.sasl.bounded import within
from spark_klog.client.security.settings.config import MskConfig
from spark_klog.errors import ConfigError, ConnectionFailed, SaslError

#: Brokers of MSK and MSK Serverless: ...kafka.REGION.amazonaws.com, ...kafka-serverless.REGION.amazonaws.com.
_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?\.?")
_SIGNER = "AWS_MSK_IAM needs the package aws-msk-iam-sasl-signer-python: pip install 'spark-klog[msk]'"


def aws_region(host: str) -> str:
    """The AWS region of a broker: from its host name, else AWS_REGION or AWS_DEFAULT_REGION.

    `ConfigError` if none of them says it.
    """
    found = _HOST.search(host)
    region = found.group(1) if found else os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(
            f"AWS_MSK_IAM needs the region of broker {host}, whose name is not one of Amazon MSK: set the environment "
            "variable AWS_REGION (in Spark on the driver and the executors)"
        )
    return region


def msk_token(config: MskConfig, region: str, deadline: float) -> tuple[str, float]:
    """(token, its expiry in seconds since the epoch), signed before `deadline`, a reading of `time.monotonic`.

    `ConfigError` without the signer, `SaslError` without credentials, `ConnectionFailed` if AWS does not answer.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider as Signer
    except ImportError:
        raise ConfigError(_SIGNER) from None

    def sign() -> tuple[str, int]:
        if config.role:
            session = (config.session,) if config.session else ()
            return Signer.generate_auth_token_from_role_arn(region, config.role, *session)  # type: ignore[no-any-return]
        if config.profile:
            return Signer.generate_auth_token_from_profile(region, config.profile)  # type: ignore[no-any-return]
        return Signer.generate_auth_token(region)  # type: ignore[no-any-return]

    try:
        token, expires_ms = within(deadline, sign, "signature of AWS")
    except TimeoutError:
        raise ConnectionFailed("AWS did not return credentials in time") from None
    except Exception as error:  # botocore raises many kinds; their texts may hold parts of credentials
        raise SaslError(
            f"no AWS credentials to sign with ({type(error).__name__}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or awsProfileName in sasl.jaas.config, or a role"
        ) from None
    return token, expires_ms / 1000
